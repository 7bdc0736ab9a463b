"""The filters leave what transformers' warpers leave, and draws follow the distribution."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from catenary.seeds import uniform
from services.engine.domain import SamplingOptions
from services.engine.sampling.draw import (
    ComparingSearch,
    Filters,
    IndexedSearch,
    Search,
    draw_wide,
    invert,
)
from services.engine.sampling.inputs import uniforms
from tests.support.sampling import CPU, exact_stages, row, run, without_float64

SEARCHES: list[Search] = [IndexedSearch(), ComparingSearch()]


def drawn(
    scores: torch.Tensor, numbers: list[float], *, wide: Search | None = None, **options: Any
) -> list[int]:
    """The tokens for these uniform numbers from one row of scores [V]; `wide`: of the whole vocabulary."""
    chosen = SamplingOptions(**options)
    count, size = len(numbers), scores.shape[0]
    top_k = chosen.top_k if chosen.top_k < size else 0
    uniforms = torch.tensor(numbers, dtype=torch.float64)
    rows = scores.expand(count, -1).contiguous()
    if wide is not None:
        filters = Filters(
            top_k=torch.full((count,), top_k),
            exact=torch.full((count,), not chosen.keep_top_k_duplicates),
            top_p=torch.full((count,), chosen.top_p, dtype=torch.float64),
            min_p=torch.full((count,), chosen.min_p, dtype=torch.float64),
            any_top_k=chosen.top_k > 0,
            any_exact=not chosen.keep_top_k_duplicates,
            any_top_p=chosen.top_p < 1,
        )
        temperature = torch.tensor(chosen.temperature).clamp_min(1e-30)
        scaled = (rows - rows.amax(-1, keepdim=True)) / temperature
        tokens = draw_wide(scaled, filters, uniforms, torch.float64, wide)
    else:
        stages = exact_stages(rows)
        stages.begin(rows, None)
        columns: list[Any] = [[chosen.temperature] * count, numbers]
        if chosen.top_k or chosen.top_p < 1 or chosen.min_p:
            exact = not chosen.keep_top_k_duplicates
            ints = torch.tensor([list(range(count)), [top_k] * count, [exact] * count])
            columns += [[chosen.top_p] * count, [chosen.min_p] * count]
            stages.filter(ints, torch.tensor(columns, dtype=torch.float64))
        else:
            stages.draw(torch.arange(count), torch.tensor(columns, dtype=torch.float64))
        tokens, _ = stages.chosen(torch.ones(count))
    result: list[int] = tokens.tolist()
    return result


def frequencies(scores: torch.Tensor, draws: int = 4000, **options: Any) -> torch.Tensor:
    """How often each token is drawn when the uniform numbers are spread evenly over [0, 1)."""
    tokens = drawn(scores, [(index + 0.5) / draws for index in range(draws)], **options)
    return torch.bincount(torch.tensor(tokens), minlength=scores.shape[0]) / draws


def by_transformers(scores: torch.Tensor, **options: Any) -> torch.Tensor:
    """The distribution [V] that transformers would draw from."""
    chosen = SamplingOptions(**options)
    warpers: Any = LogitsProcessorList([TemperatureLogitsWarper(chosen.temperature)])
    if chosen.top_k:
        warpers.append(TopKLogitsWarper(chosen.top_k))
    if chosen.top_p < 1:
        warpers.append(TopPLogitsWarper(chosen.top_p))
    if chosen.min_p:
        warpers.append(MinPLogitsWarper(chosen.min_p))
    warped: torch.Tensor = warpers(torch.zeros(1, 1, dtype=torch.int64), scores.unsqueeze(0))
    return torch.softmax(warped[0], -1)


FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"top_k": 3},
    {"top_k": 255},
    {"top_k": 256},
    {"top_k": 257},
    {"top_k": 400, "top_p": 0.97},
    {"top_k": 5, "top_p": 0.7},
    {"top_k": 10_000},
    {"top_p": 0.6},
    {"top_p": 0.98, "temperature": 1.7},
    {"top_p": 0.9999},
    {"min_p": 0.2},
    {"min_p": 1e-3},
    {"min_p": 1e-3, "top_k": 300},
    {"min_p": 0.02, "top_p": 0.9, "top_k": 50, "temperature": 1.3},
    {"min_p": 0.02, "top_p": 0.999},
]


# More tokens than the candidates are; rows of all tokens take their time.
@pytest.mark.parametrize(
    ("vocab", "wide"),
    [(12, None), (700, None), (12, SEARCHES[0]), (420, SEARCHES[0])],
    ids=["12-candidates", "700-candidates", "12-wide", "420-wide"],
)
@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_draws_follow_the_distribution_of_transformers(
    vocab: int, options: dict[str, Any], wide: Search | None
) -> None:
    scores = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab))
    expected = by_transformers(scores, **options)
    found = frequencies(scores, wide=wide, **options)
    # Each frequency is right to about the spacing of the uniform numbers.
    assert torch.allclose(found, expected, atol=6e-4)
    assert not found[expected == 0].any()


@pytest.mark.parametrize("wide", [None, SEARCHES[0]], ids=["candidates", "wide"])
@pytest.mark.parametrize("count", [2, 5, 600])
def test_ties_at_the_threshold_of_top_k(count: int, wide: Search | None) -> None:
    """Three better tokens, then `count` equal ones, in a shuffled order."""
    order = torch.randperm(700, generator=torch.Generator().manual_seed(count))
    scores = torch.full((700,), -1.0)
    scores[order[:3]] = 2.0
    scores[order[3 : 3 + count]] = 1.0
    ties = order[3 : 3 + count].sort().values
    kept = frequencies(scores, 3000, top_k=4, wide=wide)
    assert torch.allclose(kept, by_transformers(scores, top_k=4), atol=8e-4)
    assert (kept > 0).sum() == 3 + count
    exact = frequencies(scores, 500, top_k=4, keep_top_k_duplicates=False, wide=wide)
    assert set(exact.nonzero().flatten().tolist()) == {*order[:3].tolist(), int(ties[0])}


@pytest.mark.parametrize("wide", [None, SEARCHES[0]], ids=["candidates", "wide"])
def test_the_nucleus_keeps_all_that_are_as_good_as_its_last_token(wide: Search | None) -> None:
    scores = torch.tensor([3.0, 1.0, 1.0, 1.0, 0.0])
    found = frequencies(scores, top_p=0.75, wide=wide)
    weights = scores.exp() * torch.tensor([1, 1, 1, 1, 0])
    assert torch.allclose(found, weights / weights.sum(), atol=6e-4)


@settings(deadline=None, max_examples=60)
@given(
    # Libraries that a process loads may turn numbers so small that they are not normal into zeros.
    scores=st.lists(st.floats(-30, 30, width=32, allow_subnormal=False), min_size=2, max_size=40),
    copies=st.sampled_from([1, 9]),
    top_k=st.integers(0, 50),
    top_p=st.floats(0.01, 1.0),
    min_p=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    exact=st.booleans(),
    number=st.floats(0, 1, exclude_max=True),
)
def test_a_token_outside_the_filters_is_never_drawn(
    scores: list[float], copies: int, top_k: int, top_p: float, min_p: float, exact: bool, number: float
) -> None:
    values = torch.tensor(scores * copies, dtype=torch.float32)
    options = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "keep_top_k_duplicates": not exact}
    weights = torch.softmax(values.double(), 0)
    for wide in (None, *SEARCHES):
        token = drawn(values, [number], wide=wide, **options)[0]
        better = values > values[token]
        equals_before = int((values[:token] == values[token]).sum())
        assert not 0 < top_k < len(values) or int(better.sum()) + exact * equals_before < top_k
        assert not better.any() or top_k or float(weights[better].sum()) < top_p + 1e-6
        assert float(weights[token]) >= min_p * float(weights.max()) * (1 - 1e-5)


@pytest.mark.parametrize("search", SEARCHES)
@settings(deadline=None)
@given(
    weights=st.lists(st.floats(0, 1), min_size=1, max_size=20).filter(any),
    number=st.floats(0, 1, exclude_max=True),
)
def test_inversion_picks_a_token_with_weight(search: Search, weights: list[float], number: float) -> None:
    index = invert(
        torch.tensor([weights], dtype=torch.float64),
        torch.tensor([number], dtype=torch.float64),
        torch.float64,
        search,
    )
    assert weights[int(index)] > 0


@pytest.mark.parametrize("options", [{"top_p": 0.98}, {"top_k": 400, "top_p": 0.9}, {"min_p": 0.01}], ids=str)
def test_a_device_without_float64_draws_the_same_tokens_but_for_rounding(options: dict[str, Any]) -> None:
    logits = torch.randn(1, 700, generator=torch.Generator().manual_seed(4)).expand(400, -1)
    rows = [row(position=position, **options) for position in range(400)]
    ours, theirs = (run(logits, rows, device=device) for device in (CPU, without_float64()))
    assert sum(a == b for a, b in zip(ours, theirs, strict=True)) >= 398


@pytest.mark.parametrize("options", [{}, {"top_p": 0.97}, {"top_k": 20}, {"min_p": 0.02}], ids=str)
def test_seeded_draws_pass_a_chi_square_test(options: dict[str, Any]) -> None:
    """5,000 positions of one sequence on one distribution. Seeded, so it passes always or never."""
    draws, vocab = 5000, 400
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(9)) * 2
    rows = [row(seed=11, position=position, **options) for position in range(draws)]
    tokens = [result.token_id for result in run(logits.expand(draws, -1), rows)]
    counts = torch.bincount(torch.tensor(tokens), minlength=vocab).double()
    expected = by_transformers(logits[0], **options).double() * draws
    assert not counts[expected == 0].any()
    common = expected >= 5
    cells = torch.cat((counts[common], counts[~common].sum().view(1)))
    means = torch.cat((expected[common], expected[~common].sum().view(1)))
    cells, means = cells[means > 0], means[means > 0]
    statistic = float(((cells - means) ** 2 / means).sum())
    freedom = len(means) - 1
    # A chi-square variable is within four standard deviations of its mean, its number of degrees of freedom.
    assert abs(statistic - freedom) < 4 * math.sqrt(2 * freedom)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40)), min_size=1))
def test_uniform_numbers_of_many_rows_are_those_of_each(pairs: list[tuple[int, int]]) -> None:
    found = uniforms([seed for seed, _ in pairs], [position for _, position in pairs])
    assert found.tolist() == [uniform(seed, position) for seed, position in pairs]


def test_the_uniform_numbers_are_those_of_the_seeds_module() -> None:
    logits = torch.zeros(1, 1000)
    token = run(logits, [row(seed=-4, position=77)])[0].token_id
    assert token == int(uniform(-4, 77) * 1000)
