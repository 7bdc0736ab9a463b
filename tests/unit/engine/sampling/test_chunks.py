"""Reductions in two levels give what the plain ones give."""

from __future__ import annotations

import math

import pytest
import torch

from services.engine.sampling.draw import (
    ComparingSearch,
    IndexedSearch,
    Search,
    first_argmax,
    invert,
    largest,
    total,
)

WIDTHS = [1, 2, 63, 64, 65, 127, 128, 129, 511, 512, 513, 640, 8191, 8192, 8193, 9001]
SEARCHES: list[Search] = [IndexedSearch(), ComparingSearch()]


@pytest.mark.parametrize("width", WIDTHS)
def test_reductions_equal_the_plain_ones(width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    # Few different values: ties everywhere.
    values = torch.randint(0, 40, (60, width), generator=generator).float()
    assert first_argmax(values).equal(values.argmax(-1))
    assert total(values, torch.float64).equal(values.double().sum(-1))
    count = min(256, width)
    best, ids = largest(values, count)
    assert best.equal(values.topk(count, dim=-1).values)
    assert values.gather(1, ids).equal(best)
    assert all(len(set(row)) == count for row in ids.tolist())


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("width", WIDTHS)
def test_inversion_over_chunks(width: int, search: Search) -> None:
    generator = torch.Generator().manual_seed(width)
    weights = torch.randint(0, 3, (200, width), generator=generator).float()
    weights[:, -1] = 1.0
    uniform = torch.rand(200, generator=generator, dtype=torch.float64)
    uniform[0], uniform[1] = 0.0, math.nextafter(1.0, 0.0)
    found = invert(weights, uniform, torch.float64, search)
    cumulative = weights.double().cumsum(-1)
    expected = (cumulative <= (uniform * cumulative[:, -1]).unsqueeze(1)).sum(-1)
    assert found.equal(expected)


@pytest.mark.parametrize("width", [70, 5000])
@pytest.mark.parametrize("at", [0, 1, 63, 64, 69])
@pytest.mark.parametrize("search", SEARCHES)
def test_the_only_weight_is_found_by_any_number(search: Search, width: int, at: int) -> None:
    weights = torch.zeros(3, width)
    weights[:, at] = 1e-30
    uniform = torch.tensor([0.0, 0.5, math.nextafter(1.0, 0.0)], dtype=torch.float64)
    assert invert(weights, uniform, torch.float64, search).tolist() == [at] * 3


def test_nan_is_the_largest() -> None:
    values = torch.zeros(1, 1000)
    values[0, 777] = math.nan
    assert first_argmax(values).tolist() == [777]


@pytest.mark.parametrize("search", SEARCHES)
def test_a_target_beyond_the_sum_means_the_last_weight(search: Search) -> None:
    cumulative = torch.tensor([[1.0, 2.0, 2.0, 2.0], [0.0, 3.0, 4.0, 4.0]])
    for target in ([2.0, 4.0], [2.5, 9.0]):
        assert search.first_above(cumulative, torch.tensor(target)).tolist() == [[1], [2]]


@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
def test_both_searches_find_the_same_threshold(integers: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    scores = -torch.rand(60, 300, generator=generator).mul_(20).exp_().mul_(1e-6)
    scores[:, :40] = scores[:, 40:80]
    scores[5:9, 100:] = -torch.inf
    scores[:, 7] = 0.0
    scores[9] = 0.0
    scores[10:12] = -torch.finfo(torch.float32).max
    weights = torch.randint(0, 1000, scores.shape, generator=generator).to(integers)
    total = weights.sum(-1, dtype=integers)
    for share in (0.0, 0.3, 0.9, 1.0):
        target = (total.double() * share).to(integers).clamp_min(1)
        indexed, comparing = (
            search.magnitudes(scores)
            <= search.threshold(search.magnitudes(scores), weights, target).unsqueeze(1)
            for search in SEARCHES
        )
        assert indexed.equal(comparing)
        reached = torch.where(comparing, weights, 0).sum(-1)
        assert (reached >= target).all()
