"""Sampling options through the whole core: chunks, steps that overlap, neighbours, preemption."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from services.engine.domain import CoreErrorCode, FinishReason
from tests.support.torch_engine import VOCAB, LocalCore, Output, save_tiny_model, tiny_options

PROMPT = [5, 9, 33, 5, 71, 9, 5]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def core(directory: Path) -> LocalCore:
    return LocalCore(tiny_options(directory))


@pytest.fixture(scope="module")
def reference(directory: Path) -> Any:
    model: Any = transformers.LlamaForCausalLM.from_pretrained(directory, dtype="float32")
    model.generation_config.eos_token_id = None
    return model.eval()


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(length)]


def generated(core: LocalCore, token_ids: list[int], **options: Any) -> list[int]:
    key = core.submit(list(token_ids), **options)
    core.run()
    return core.outputs[key].token_ids


def generated_beside(core: LocalCore, token_ids: list[int]) -> list[int]:
    """While others run on."""
    key = core.submit(list(token_ids))
    while core.outputs[key].end is None:
        core.step()
    return core.outputs[key].token_ids


def values(output: Output) -> list[float]:
    return [value for value, _ in output.prompt]


def by_transformers(reference: Any, token_ids: list[int], count: int, **options: Any) -> list[int]:
    with torch.inference_mode():
        whole = reference.generate(
            torch.tensor([token_ids]),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
            **options,
        )
    tokens: list[int] = whole[0, len(token_ids) :].tolist()
    return tokens


def test_penalties_and_bans_give_the_tokens_of_transformers(core: LocalCore, reference: Any) -> None:
    """In one batch. The newest token is on the device alone when the next one is sampled."""
    plain = by_transformers(reference, PROMPT, 20)
    words = [[plain[0]], plain[3:5], plain[7:10]]
    bias = {(plain[1],): -3.0, (40,): 2.5}
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        ({"repetition_penalty": 1.7}, {"repetition_penalty": 1.7}),
        ({"bad_words": tuple(map(tuple, words))}, {"bad_words_ids": words}),
        ({"logit_bias": tuple((ids[0], value) for ids, value in bias.items())}, {"sequence_bias": bias}),
        (
            {"repetition_penalty": 0.8, "bad_words": ((plain[0], plain[1]),)},
            {"repetition_penalty": 0.8, "bad_words_ids": [plain[:2]]},
        ),
    ]
    keys = [core.submit(PROMPT, max_tokens=20, **ours) for ours, _ in cases]
    core.run()
    for key, (_, theirs) in zip(keys, cases, strict=True):
        assert core.outputs[key].token_ids == by_transformers(reference, PROMPT, 20, **theirs)
    assert len({tuple(core.outputs[key].token_ids) for key in keys}) == len(cases)


def test_a_penalty_counts_generated_tokens_and_spares_the_neighbour(core: LocalCore) -> None:
    """C29: the penalised one and its neighbour get what each gets alone, whatever is padded."""
    options = {"max_tokens": 40, "frequency_penalty": 1.05, "presence_penalty": 0.5}
    long = prompt(31)
    alone = generated(core, PROMPT, **options), generated(core, long, max_tokens=40)
    keys = core.submit(PROMPT, **options), core.submit(long, max_tokens=40)
    core.run()
    assert tuple(core.outputs[key].token_ids for key in keys) == alone
    assert alone[0] != generated(core, PROMPT, max_tokens=40)
    # Taken up again after half of it: the first half still counts as generated.
    whole = alone[0]
    assert generated(core, PROMPT + whole[:20], prompt_len=len(PROMPT), **options) == whole[20:]


@pytest.mark.parametrize(
    "options", [{}, {"top_p": 0.9}, {"min_p": 0.05, "presence_penalty": 1.0}, {"top_k": 7}], ids=str
)
def test_a_seed_gives_the_same_tokens_alone_among_others_and_taken_up_again(
    core: LocalCore, options: dict[str, Any]
) -> None:
    """C28."""
    chosen = {"temperature": 0.9, "seed": 123, "max_tokens": 20, **options}
    alone = generated(core, PROMPT, **chosen)
    assert generated(core, PROMPT, **chosen) == alone
    for other in range(4):
        core.submit(prompt(5 + 9 * other, other), max_tokens=30, temperature=1.0, seed=other)
    assert generated(core, PROMPT, **chosen) == alone
    assert generated(core, PROMPT + alone[:9], prompt_len=len(PROMPT), **chosen) == alone[9:]
    assert generated(core, PROMPT, **{**chosen, "seed": 124}) != alone


@pytest.mark.advisory("GHSA-6cxc-2vcg-w5qc")
def test_the_next_sequence_of_a_row_has_nothing_of_the_one_before(core: LocalCore) -> None:
    """Beside a neighbour that stays, so that the batch is never built anew."""
    plain, other = generated(core, PROMPT), prompt(31)
    expected = generated(core, other, max_tokens=40)
    neighbour = core.submit(other, max_tokens=40)
    options: list[dict[str, Any]] = [
        {"allowed_token_ids": (3, 44, 100)},
        {"bad_words": tuple((token,) for token in plain[:4])},
        {"logit_bias": tuple((token, -100.0) for token in plain[:4])},
        {"repetition_penalty": 1.9, "frequency_penalty": 2.0, "temperature": 2.0, "seed": 1, "top_k": 3},
    ]
    for one in options:
        core.submit(PROMPT, max_tokens=2, **one)
        for _ in range(4):
            core.step()
        assert generated_beside(core, PROMPT) == plain, one
    core.run()
    assert core.outputs[neighbour].token_ids == expected


def test_allowed_ids_are_all_that_is_generated(core: LocalCore) -> None:
    allowed = (3, 44, 100)
    key = core.submit(PROMPT, allowed_token_ids=allowed, temperature=3.0, max_tokens=30)
    core.run()
    assert set(core.outputs[key].token_ids) == set(allowed)


def test_a_sequence_with_no_token_left_fails_alone(core: LocalCore) -> None:
    expected = generated(core, PROMPT)
    stuck = core.submit(PROMPT, allowed_token_ids=(50,), bad_words=((50, 50),), max_tokens=9)
    fine = core.submit(PROMPT)
    core.run()
    output = core.outputs[stuck]
    assert output.token_ids == [50]
    assert output.end is not None
    assert (output.end.reason, output.end.error_code) == (
        FinishReason.ERROR,
        CoreErrorCode.INVALID_ARGUMENT,
    )
    assert core.outputs[fine].token_ids == expected


BAD_IDS: list[dict[str, Any]] = [
    {name: value}
    for bad in (-1, VOCAB, 2**40)
    for name, value in (
        ("stop_token_ids", [4, bad]),
        ("logit_bias", ((bad, 1.0),)),
        ("bad_words", ((4,), (4, bad))),
        ("allowed_token_ids", (bad,)),
    )
]


@pytest.mark.parametrize("options", BAD_IDS, ids=str)
@pytest.mark.advisory("CVE-2026-93840")
def test_ids_that_index_no_logit_never_reach_the_device(core: LocalCore, options: dict[str, Any]) -> None:
    """C23, in the core itself: the servicer refuses them before."""
    key = core.submit(PROMPT, **options)
    core.run()
    end = core.outputs[key].end
    assert end is not None
    assert end.error_code is CoreErrorCode.INVALID_ARGUMENT
    assert next(iter(options)) in (end.error_message or "")


def test_prompt_log_probabilities_come_through_chunks(core: LocalCore, reference: Any) -> None:
    """C20, C21, C24: of every prompt token but the first, with any number of alternatives, and twice."""
    counts = [0, 1, 9, 10, 11, 20]
    prompts = [prompt(length, length) for length in (1, 2, 23, 24, 25, 90)]
    keys = [
        core.submit(one, prompt_logprobs=count, max_tokens=3)
        for one, count in zip(prompts, counts, strict=True)
    ]
    again = core.submit(prompts[-1], prompt_logprobs=20, max_tokens=3)
    plain = core.submit(prompts[-1], max_tokens=3)
    core.run()
    assert values(core.outputs[again]) == pytest.approx(values(core.outputs[keys[-1]]), abs=1e-5)
    assert core.outputs[plain].prompt == []
    assert core.outputs[plain].token_ids == core.outputs[again].token_ids
    for key, one, count in zip(keys, prompts, counts, strict=True):
        with torch.inference_mode():
            truth = torch.log_softmax(reference(torch.tensor([one])).logits[0], -1)
        found = core.outputs[key].prompt
        assert len(found) == len(one) - 1
        for position, (value, top) in enumerate(found):
            assert value == pytest.approx(float(truth[position, one[position + 1]]), abs=1e-4)
            best = truth[position].topk(count)
            assert list(top.values()) == pytest.approx(best.values.tolist(), abs=1e-4)
            assert all(float(truth[position, i]) == pytest.approx(v, abs=1e-4) for i, v in top.items())


def test_prompt_log_probabilities_are_of_the_prompt_alone(core: LocalCore) -> None:
    key = core.submit([*PROMPT, 40, 41, 42], prompt_len=len(PROMPT), prompt_logprobs=1, max_tokens=6)
    core.run()
    assert len(core.outputs[key].prompt) == len(PROMPT) - 1


def test_a_preempted_prompt_is_reported_once(directory: Path) -> None:
    core = LocalCore(tiny_options(directory))
    long = prompt(90)
    key = core.submit(long, prompt_logprobs=2, max_tokens=2)
    core.run()
    whole = core.outputs[key].prompt
    second = core.submit(long, prompt_logprobs=2, max_tokens=2)
    core.step()
    core.step()
    scheduler: Any = core.engine.scheduler
    assert 0 < len(core.outputs[second].prompt) < 89
    scheduler.planner.preempt(scheduler.live[second])
    core.run()
    found = core.outputs[second].prompt
    assert [list(top) for _, top in found] == [list(top) for _, top in whole]
    assert values(core.outputs[second]) == pytest.approx(values(core.outputs[key]), abs=1e-5)
