"""Bias, bans and penalties against transformers' processors; log probabilities against log_softmax."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from services.engine.domain import SamplingOptions
from services.engine.sampling import (
    RowParams,
    SequenceState,
    SequenceStates,
    unpack_prompt,
)
from services.engine.sampling.stages import logprob_columns
from tests.support.sampling import CPU, adjusted, row, run

VOCAB = 60


def by_transformers(
    logits: torch.Tensor, tokens: list[int], prompt_len: int, options: SamplingOptions
) -> torch.Tensor:
    """One row [V] by transformers; it has no presence and frequency penalties: by OpenAI's formula."""
    processors: Any = LogitsProcessorList()
    if options.logit_bias:
        bias: Any = {(token,): value for token, value in options.logit_bias}
        processors.append(SequenceBiasLogitsProcessor(bias))
    processors.append(RepetitionPenaltyLogitsProcessor(options.repetition_penalty))
    if options.bad_words:
        processors.append(NoBadWordsLogitsProcessor([list(word) for word in options.bad_words]))
    scores: torch.Tensor = processors(torch.tensor([tokens]), logits.unsqueeze(0).clone())[0]
    counts = torch.bincount(torch.tensor(tokens[prompt_len:], dtype=torch.int64), minlength=VOCAB)
    return scores - options.frequency_penalty * counts - options.presence_penalty * (counts > 0)


def random_options(rng: random.Random, tokens: list[int]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if rng.random() < 0.5:
        options["repetition_penalty"] = rng.choice([0.5, 1.3, 2.0])
    if rng.random() < 0.5:
        options["frequency_penalty"] = rng.choice([-2.0, 0.3])
    if rng.random() < 0.5:
        options["presence_penalty"] = rng.choice([-0.4, 2.0])
    if rng.random() < 0.5:
        chosen = rng.sample(range(VOCAB), 7)
        options["logit_bias"] = tuple((token, rng.uniform(-100, 100)) for token in chosen)
    if rng.random() < 0.7:
        words = [tuple(rng.choices(range(VOCAB), k=rng.randint(1, 4))) for _ in range(5)]
        # Some that the sequence is about to complete, one of them with a prefix that is the whole sequence.
        words += [(*tokens[-size:], rng.randrange(VOCAB)) for size in (1, 2, 3, len(tokens))]
        words += [(*tokens, 3, 4)]
        options["bad_words"] = tuple(words)
    return options


@pytest.mark.parametrize("seed", range(25))
def test_rows_are_adjusted_as_by_transformers(seed: int) -> None:
    """Random rows in one batch; for each the newest token is on the host, or still on the device."""
    rng = random.Random(seed)
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(seed)) * 4
    last_tokens = [rng.randrange(VOCAB) for _ in range(6)]
    rows: list[RowParams] = []
    expected: list[torch.Tensor] = []
    for index in range(6):
        tokens = rng.choices(range(VOCAB), k=rng.randint(1, 90))
        prompt_len = rng.randint(0, len(tokens))
        pending = rng.random() < 0.6
        whole = [*tokens, last_tokens[index]] if pending else tokens
        options = random_options(rng, whole)
        given = row(
            tokens=tokens, prompt_len=prompt_len, pending_row=index if pending else None, seed=1, **options
        )
        rows.append(given)
        expected.append(by_transformers(logits[index], whole, prompt_len, given.state.options))
    found = adjusted(torch.cat((logits, torch.zeros(2, VOCAB))), rows, last_tokens)
    assert torch.allclose(found[:6], torch.stack(expected), rtol=1e-6, atol=1e-5)
    assert not found[6:].any()


def test_a_row_without_options_is_left_bit_by_bit_as_it_is() -> None:
    logits = torch.randn(2, VOCAB)
    rows = [row(tokens=[1, 2], pending_row=0), row(tokens=[1], repetition_penalty=2.0, pending_row=0)]
    found = adjusted(logits, rows, [5])
    assert found[0].equal(logits[0])
    assert (found[1] != logits[1]).nonzero().flatten().tolist() == [1, 5]


def test_logits_are_never_changed_in_place() -> None:
    logits = torch.randn(1, VOCAB)
    before = logits.clone()
    options: dict[str, Any] = {"presence_penalty": 1.0, "logit_bias": ((3, 2.0),), "allowed_token_ids": (1,)}
    run(logits, [row(tokens=[1], masked_ids={4}, **options)])
    assert logits.equal(before)


def test_allowed_ids_are_all_that_is_left() -> None:
    logits = torch.randn(3, VOCAB)
    rows = [row(allowed_token_ids=(0, 7, 59)), row(), row(allowed_token_ids=(4,), logit_bias=((4, 1.5),))]
    found = adjusted(logits, rows)
    assert found[0].isfinite().nonzero().flatten().tolist() == [0, 7, 59]
    assert found[0, [0, 7, 59]].equal(logits[0, [0, 7, 59]])
    assert found[1].equal(logits[1])
    assert found[2].isfinite().nonzero().flatten().tolist() == [4]
    assert float(found[2, 4]) == float(logits[2, 4] + 1.5)


def test_counts_follow_a_growing_sequence() -> None:
    tokens = list(range(100))
    state = SequenceState(SamplingOptions(frequency_penalty=1.0), tokens, 90)
    for new in (5, 95, 95, 200):
        assert state.counts is not None
        ids, generated = state.counts.update()
        assert sorted(ids.tolist()) == sorted(set(tokens))
        found = dict(zip(ids.tolist(), generated.tolist(), strict=True))
        assert all(found[token] == tokens[90:].count(token) for token in found)
        tokens.append(new)


def test_a_row_that_changes_hands_gets_a_new_state() -> None:
    states = SequenceStates(2)
    options, one, other = SamplingOptions(), [1, 2], [1, 2]
    state = states.get(1, options, one, 2)
    assert states.get(1, options, one, 2) is state
    assert states.get(1, options, other, 2) is not state
    assert states.get(1, options, one, 2) is not state


@pytest.mark.parametrize("count", [0, 1, 9, 10, 11, 20])
def test_log_probabilities_are_of_the_models_own_distribution(count: int) -> None:
    logits = torch.randn(3, VOCAB)
    rows = [
        row(top_logprobs=count, temperature=0.2, top_k=2),
        row(),
        row(top_logprobs=count, temperature=0.0, logit_bias=((7, 99.0),)),
    ]
    results = run(logits, rows)
    truth = torch.log_softmax(logits, -1)
    assert (results[1].logprob, results[1].top) == (None, ())
    for index in (0, 2):
        token = results[index].token_id
        assert token is not None
        assert results[index].logprob == pytest.approx(float(truth[index, token]), abs=1e-6)
        best = truth[index].topk(count)
        assert [i for i, _ in results[index].top] == best.indices.tolist()
        assert [v for _, v in results[index].top] == pytest.approx(best.values.tolist(), abs=1e-6)
    assert results[2].token_id == 7


@pytest.mark.parametrize("count", [0, 3, 20])
def test_prompt_log_probabilities(count: int) -> None:
    logits = torch.randn(5, VOCAB).bfloat16()
    targets = torch.tensor([0, 59, 3, 3, 8])
    truth = torch.log_softmax(logits.float(), -1)
    found = unpack_prompt(logprob_columns(logits.float(), targets, CPU, alternatives=count > 0), count)
    for index, (value, top) in enumerate(found):
        best = truth[index].topk(count)
        assert value == pytest.approx(float(truth[index, targets[index]]), abs=1e-6)
        assert [v for _, v in top] == pytest.approx(best.values.tolist(), abs=1e-6)
        assert all(float(truth[index, i]) == pytest.approx(v, abs=1e-6) for i, v in top)
