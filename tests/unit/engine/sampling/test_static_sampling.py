"""Sampling in static shapes gives what sampling in dynamic shapes gives, row by row."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.runner.batches import static_counts
from services.engine.sampling import Counts, Program, RowStatus, SampledToken
from tests.support.graph_device import GraphDevice
from tests.support.sampling import row, run, without_float64
from tests.support.sampling_rows import LAST_TOKENS, VOCAB, random_logits, random_masks, random_row
from tests.support.static_sampling import STATIC_CPU, ShapeWatch, StaticCpu, StaticSampler, run_static


def same(one: list[SampledToken], other: list[SampledToken]) -> None:
    assert [r.status for r in one] == [r.status for r in other]
    assert one == other


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(0, 2))
def test_the_two_ways_agree(seed: int, count: int, spare: int) -> None:
    rng = random.Random(seed)
    rows = [random_row(rng) for _ in range(count)]
    logits = random_logits(rng, count + spare)
    same(run_static(logits, rows, last_tokens=LAST_TOKENS), run(logits, rows, last_tokens=LAST_TOKENS))


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 11))
def test_they_agree_on_masked_rows(seed: int, count: int) -> None:
    rng = random.Random(seed)
    rows = [random_row(rng) for _ in range(count)]
    logits, masks = random_logits(rng, count), random_masks(rng, count)
    found = run(logits, rows, last_tokens=LAST_TOKENS, masks=masks)
    same(run_static(logits, rows, last_tokens=LAST_TOKENS, masks=masks), found)
    for index, bits in zip(masks.rows, masks.bits, strict=True):
        token = found[index].token_id
        if token is not None:
            assert bits[token // 32] >> token % 32 & 1
        elif not bits.any():
            assert found[index].status is RowStatus.NOTHING_LEFT
    free = [index for index in range(count) if index not in masks.rows]
    unmasked = run(logits, rows, last_tokens=LAST_TOKENS)
    assert [found[index] for index in free] == [unmasked[index] for index in free]


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 10**6))
def test_they_agree_without_float64(seed: int) -> None:
    rng = random.Random(seed)
    rows = [random_row(rng) for _ in range(4)]
    logits = random_logits(rng, 4)
    static = run_static(logits, rows, last_tokens=LAST_TOKENS, device=StaticCpu(wide=torch.float32))
    same(static, run(logits, rows, last_tokens=LAST_TOKENS, device=without_float64()))


@pytest.mark.parametrize("vocab", [5, 64, 130, 8300])
def test_they_agree_for_small_and_large_vocabularies(vocab: int) -> None:
    rng = random.Random(vocab)
    options: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0, "top_logprobs": 3},
        {"top_p": 0.9},
        {"top_k": 3, "keep_top_k_duplicates": False, "top_logprobs": 20},
        {"top_p": 0.999, "temperature": 4.0},
        {"min_p": 0.1, "logit_bias": ((4, 1.5),)},
    ]
    rows = [row(seed=seed, **chosen) for seed in range(3) for chosen in options]
    logits = random_logits(rng, len(rows), vocab)
    same(run_static(logits, rows), run(logits, rows))


def test_they_agree_where_all_tokens_are_alike() -> None:
    rows = [
        row(seed=seed, top_k=top_k, top_p=top_p, keep_top_k_duplicates=keeps)
        for seed in range(3)
        for top_k in (0, 3, 256, 300)
        for top_p in (0.3, 1.0)
        for keeps in (False, True)
    ]
    best = torch.arange(100, 400)
    for logits in (torch.zeros(len(rows), VOCAB), torch.zeros(len(rows), VOCAB).index_fill_(1, best, 5.0)):
        same(run_static(logits, rows), run(logits, rows))


def test_values_that_are_no_numbers_give_the_same_status() -> None:
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(3))
    logits[0, 3], logits[1, 4], logits[2] = torch.nan, torch.inf, -torch.inf
    logits[3, 7] = torch.nan
    rows = [
        row(),
        row(temperature=0.0),
        row(top_p=0.5),
        row(allowed_token_ids=(1, 2)),
        row(allowed_token_ids=(1, 2), masked_ids={1, 2}, top_k=3),
        row(temperature=0.0, bad_words=tuple((token,) for token in range(40))),
    ]
    same(run_static(logits, rows), run(logits, rows))
    plain = [row(temperature=0.0)] * 6
    same(run_static(logits, plain), run(logits, plain))


def test_scores_that_overflow_fail_alone() -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(3))
    logits[:, 7] = 3e38
    # A hundred times as large is more than a float holds.
    seen: dict[str, Any] = {"tokens": [7], "repetition_penalty": 0.01}
    broken = [row(**seen), row(**seen, temperature=0.0), row(**seen, top_p=0.5)]
    broken.append(row(tokens=[2], repetition_penalty=0.01, pending_row=0))
    sound = row(allowed_token_ids=(1, 2))
    for rows in (broken, [*broken, sound]):
        given = logits[: len(rows)]
        static, dynamic = run_static(given, rows, last_tokens=[7]), run(given, rows, last_tokens=[7])
        same(static, dynamic)
        assert [one.status for one in static[:4]] == [RowStatus.NOT_FINITE] * 4
        assert all(one.status is RowStatus.SAMPLED for one in static[4:])


@pytest.mark.advisory("CVE-2026-73558")
def test_a_row_does_not_depend_on_its_neighbours() -> None:
    rng = random.Random(8)
    rows = [random_row(rng) for _ in range(9)]
    logits = random_logits(rng, 9)
    sampler = StaticSampler(9, VOCAB)
    together = sampler.run(logits, rows, LAST_TOKENS)
    for index in range(9):
        # Whatever the buffers hold of the rows before.
        alone = sampler.run(logits[index : index + 1], rows[index : index + 1], LAST_TOKENS)
        same(alone, together[index : index + 1])


def test_lists_longer_than_the_largest_slice() -> None:
    rng = random.Random(1)
    vocab = 9000
    rows = [
        row(tokens=list(range(5, 8900)), prompt_len=9, repetition_penalty=1.3, presence_penalty=0.4),
        row(temperature=0.0, allowed_token_ids=tuple(range(3, 8000)), logit_bias=((4, 9.0), (8500, 99.0))),
        row(tokens=rng.choices(range(vocab), k=9000), frequency_penalty=1.0, pending_row=1),
        row(temperature=0.0, bad_words=tuple((token,) for token in range(8000))),
    ]
    logits = random_logits(rng, 4, vocab)
    same(run_static(logits, rows, last_tokens=LAST_TOKENS), run(logits, rows, last_tokens=LAST_TOKENS))


def test_more_drawn_rows_than_a_slice_holds() -> None:
    rng = random.Random(2)
    rows = [row(seed=seed, top_logprobs=seed % 3 - 1, top_p=rng.choice([1.0, 0.9])) for seed in range(150)]
    logits = random_logits(rng, 150)
    same(run_static(logits, rows), run(logits, rows))


def test_each_computation_may_be_captured_and_replayed() -> None:
    rng = random.Random(4)
    device = GraphDevice(static_shapes=True)
    sampler = StaticSampler(4, VOCAB, device)
    for _ in range(12):
        rows = [random_row(rng) for _ in range(4)]
        logits = random_logits(rng, 4)
        same(sampler.run(logits, rows, LAST_TOKENS), run(logits, rows, last_tokens=LAST_TOKENS))
    shapes = sum(len(counts) for counts in sampler.program.counts.values())
    assert len(device.replays) <= shapes
    assert device.eager == 0


def test_after_all_shapes_were_visited_there_is_no_new_operation() -> None:
    rng = random.Random(6)
    sampler = StaticSampler(4, VOCAB, StaticCpu(wide=torch.float32))
    watch = sampler.watch = ShapeWatch()
    sampler.visit()
    known = set(watch.seen)
    sampler.graphs.serve()
    for _ in range(40):
        rows = [random_row(rng) for _ in range(rng.randint(1, 4))]
        sampler.run(random_logits(rng, 4), rows, LAST_TOKENS)
    assert not watch.seen - known
    assert sampler.graphs.first_seen == 0
    dtypes = {found for described in known for found in _dtypes(described)}
    assert torch.float64 not in dtypes


def _dtypes(described: Any) -> Iterator[torch.dtype]:
    if isinstance(described, torch.dtype):
        yield described
    elif isinstance(described, tuple):
        for one in described:
            yield from _dtypes(one)


@pytest.mark.parametrize(
    ("rows", "vocab", "most"), [(32, 128_256, 47), (256, 151_936, 56), (4096, 32_000, 68)]
)
def test_the_shapes_are_few(rows: int, vocab: int, most: int) -> None:
    program = Program(STATIC_CPU, vocab, Counts.static(static_counts(rows), vocab), 64, 2048)
    assert sum(len(counts) for counts in program.counts.values()) <= most
