"""Laws of sampling: the right distribution, and a row that never depends on its neighbours."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.device import CpuDevice
from services.engine.sampling import RowParams, SampledToken, sample
from services.engine.sampling.draw import draw, invert

DEVICE = CpuDevice(1)


def row(**changes: object) -> RowParams:
    values: dict[str, object] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 5, "position": 9}
    return RowParams(**{**values, **changes})  # type: ignore[arg-type]


def counts(scores: torch.Tensor, top_k: int, top_p: float, draws: int = 4000) -> torch.Tensor:
    """How often each token is drawn when the uniform numbers are spread evenly over [0, 1)."""
    uniform = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws
    tokens = draw(
        scores.expand(draws, -1),
        torch.full((draws,), top_k),
        torch.full((draws,), top_p, dtype=torch.float64),
        uniform,
        torch.float64,
    )
    return torch.bincount(tokens, minlength=scores.shape[0]) / draws


def filtered(scores: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """The distribution by the book: cut to k, renormalise, keep the smallest nucleus, renormalise."""
    order = sorted(range(scores.shape[0]), key=lambda index: (-float(scores[index]), index))
    weights = [math.exp(float(scores[index] - scores.max())) for index in order]
    if top_k:
        weights = weights[:top_k]
    total = sum(weights)
    kept: list[float] = []
    for weight in weights:
        kept.append(weight / total)
        if sum(kept) >= top_p - 1e-12:
            break
    result = torch.zeros(scores.shape[0], dtype=torch.float64)
    for index, weight in zip(order, kept, strict=False):
        result[index] = weight / sum(kept)
    return result


@pytest.mark.parametrize("vocab", [12, 700])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (3, 1.0), (0, 0.6), (5, 0.7), (400, 0.97), (0, 0.98)])
def test_draws_follow_the_filtered_distribution(vocab: int, top_k: int, top_p: float) -> None:
    generator = torch.Generator().manual_seed(vocab)
    scores = torch.randn(vocab, generator=generator)
    # Each frequency is right to about the spacing of the uniform numbers.
    assert torch.allclose(counts(scores, top_k, top_p).double(), filtered(scores, top_k, top_p), atol=6e-4)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.floats(-30, 30), min_size=2, max_size=40),
    st.integers(0, 50),
    st.floats(0.01, 1.0),
    st.floats(0, 1, exclude_max=True),
)
def test_a_token_outside_the_filter_is_never_drawn(
    scores: list[float], top_k: int, top_p: float, uniform: float
) -> None:
    values = torch.tensor(scores, dtype=torch.float32)
    token = draw(
        values.unsqueeze(0),
        torch.tensor([top_k]),
        torch.tensor([top_p], dtype=torch.float64),
        torch.tensor([uniform], dtype=torch.float64),
        torch.float64,
    )
    better = int((values > values[token]).sum())
    mass = float(torch.softmax(values.double(), 0)[values > values[token]].sum())
    assert not top_k or better < top_k
    assert better == 0 or mass < top_p + 1e-9 or top_k


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20).filter(any), st.floats(0, 1, exclude_max=True))
def test_inversion_picks_a_token_with_weight(weights: list[float], uniform: float) -> None:
    index = invert(torch.tensor([weights], dtype=torch.float64), torch.tensor([uniform], dtype=torch.float64))
    assert weights[int(index)] > 0


def mixed_rows() -> tuple[torch.Tensor, list[RowParams]]:
    generator = torch.Generator().manual_seed(1)
    rows = [
        row(temperature=0.0),
        row(temperature=0.7, top_p=0.9, seed=1),
        row(temperature=1.3, seed=2, top_logprobs=4),
        row(top_k=40, seed=3, top_logprobs=0),
        row(top_k=300, top_p=0.99, seed=4),
        row(top_p=0.999, temperature=2.0, seed=5, top_logprobs=20),
        row(temperature=0.5, seed=6, masked_ids=frozenset({1, 2, 3})),
    ]
    return torch.randn(len(rows), 900, generator=generator) * 3, rows


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits, rows = mixed_rows()
    together = sample(logits.clone(), rows, DEVICE)
    for index in range(len(rows)):
        assert sample(logits[index : index + 1].clone(), [rows[index]], DEVICE) == [together[index]]
    order = [4, 0, 6, 2, 5, 1, 3]
    shuffled = sample(logits[order].clone(), [rows[index] for index in order], DEVICE)
    assert shuffled == [together[index] for index in order]
    doubled = sample(torch.cat((logits, logits)), rows + rows, DEVICE)
    assert doubled == together + together


def test_a_draw_depends_on_seed_and_position() -> None:
    logits = torch.zeros(1, 5000)
    first = sample(logits, [row(seed=1, position=1)], DEVICE)
    assert first == sample(logits, [row(seed=1, position=1)], DEVICE)
    others = {
        sample(logits, [row(seed=seed, position=position)], DEVICE)[0].token_id
        for seed in (1, 2, -3)
        for position in (1, 2, 100_000)
    }
    assert len(others) == 9


@pytest.mark.parametrize(
    "params",
    [row(temperature=0.0), row(top_k=1), row(top_p=1e-9), row(temperature=1e-45), row(temperature=1e-5)],
)
def test_the_best_token_where_only_it_is_left(params: RowParams) -> None:
    logits = torch.randn(1, 3000, generator=torch.Generator().manual_seed(2)).bfloat16()
    assert sample(logits, [params], DEVICE)[0].token_id == int(logits.argmax())


def test_masked_ids_are_not_sampled_and_logprobs_do_not_show_it() -> None:
    logits = torch.tensor([[5.0, 1.0, 0.0]])
    for params in (row(temperature=0.0), row(temperature=0.3), row(top_k=1)):
        masked = RowParams(
            params.temperature, 1.0, params.top_k, 1, 1, masked_ids=frozenset({0, 999}), top_logprobs=2
        )
        result = sample(logits, [masked], DEVICE)[0]
        expected = torch.log_softmax(logits[0], 0)
        assert result.token_id in (1, 2)
        assert result.logprob == pytest.approx(float(expected[result.token_id]))
        assert [token for token, _ in result.top] == [0, 1]
        assert result.top[0][1] == pytest.approx(float(expected[0]))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_fails_alone(bad: float) -> None:
    logits, rows = mixed_rows()
    expected = sample(logits.clone(), rows, DEVICE)
    for index in range(len(rows)):
        broken = logits.clone()
        broken[index, 17] = bad
        results = sample(broken, rows, DEVICE)
        assert results[index] == SampledToken(None)
        assert results[:index] + results[index + 1 :] == expected[:index] + expected[index + 1 :]


def test_tokens_that_the_model_rules_out_are_no_failure() -> None:
    logits = torch.full((1, 50), -math.inf)
    logits[0, 7] = 1.0
    assert sample(logits, [row(top_p=0.5)], DEVICE)[0].token_id == 7
