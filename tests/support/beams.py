"""What transformers' beam search finds, and what an engine's core did."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from services.engine.domain import BeamOptions, FinishReason
from tests.support.torch_engine import LocalCore

# A generated sequence and its score.
Found = tuple[list[int], float]


def expected_beams(
    model: Any, prompt: Sequence[int], options: BeamOptions, *, stops: Sequence[int], **given: Any
) -> list[Found]:
    """The hypotheses of `generate(num_beams=...)`, without padding."""
    with torch.inference_mode():
        found = model.generate(
            torch.tensor([list(prompt)]),
            num_beams=options.width,
            num_return_sequences=options.results,
            length_penalty=options.length_penalty,
            early_stopping=options.early_stopping,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            eos_token_id=list(stops) or None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
            **given,
        )
    results: list[Found] = []
    for ids, score in zip(found.sequences.tolist(), found.sequences_scores.tolist(), strict=True):
        tokens = ids[len(prompt) :]
        ends = [index for index, token in enumerate(tokens) if token in stops]
        results.append((tokens[: ends[0] + 1] if ends else tokens, score))
    return results


def check_beams(core: LocalCore, key: int, expected: list[Found], *, stops: Sequence[int]) -> None:
    """Compares the end of a search with what was expected, token by token."""
    end = core.outputs[key].end
    assert end is not None
    assert core.outputs[key].token_ids == []
    assert [one.token_ids for one in end.hypotheses] == [tokens for tokens, _ in expected]
    scores = [score for _, score in expected]
    assert [one.score for one in end.hypotheses] == pytest.approx(scores, rel=1e-4, abs=1e-4)
    for one in end.hypotheses:
        stopped = one.token_ids[-1] in stops
        assert one.reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        assert one.stop_token_id == (one.token_ids[-1] if stopped else None)
    best = end.hypotheses[0]
    assert (end.reason, end.stop_token_id) == (best.reason, best.stop_token_id)
    assert end.completion_tokens == sum(len(one.token_ids) for one in end.hypotheses)
