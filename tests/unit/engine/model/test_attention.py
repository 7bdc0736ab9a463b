"""Paged attention with every feature equals plain attention over each sequence alone."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from services.engine.device import AttentionFeatures
from services.engine.device import attention as explicit_module
from services.engine.device.cpu import CpuDevice
from services.engine.model.paged import PrefillInputs, attend
from services.engine.model.transformers_backend import UnsupportedAttention
from services.engine.model.transformers_backend.modules import paged_attention
from tests.support.paged_sequences import SCALE, Heads, Sequences

BLOCK = 4
HEADS = 6

FEATURES = {
    "plain": AttentionFeatures(),
    "softcap": AttentionFeatures(softcap=0.7),
    "sinks": AttentionFeatures(sinks=torch.tensor([0.5, -1.0, 3.0, 0.0, 1.5, -4.0])),
    "alibi": AttentionFeatures(alibi=torch.tensor([0.5, 0.25, 0.1, 0.05, 1.0, 0.0])),
    "all": AttentionFeatures(
        softcap=1.3, sinks=torch.linspace(-1, 2, HEADS), alibi=torch.linspace(0.01, 0.4, HEADS)
    ),
}
CASES = list(itertools.product(FEATURES, (None, 5), (8, 3)))


@pytest.mark.parametrize(("name", "window", "value_dim"), CASES)
def test_chunks_and_decode_equal_plain_attention(name: str, window: int | None, value_dim: int) -> None:
    features = FEATURES[name]
    batch = Sequences([1, 5, 13, 23], Heads(value_dim=value_dim), CpuDevice(1))
    expected = [batch.expected(row, features, window) for row in range(4)]
    first = batch.prefill([0, 0, 0, 0], 6, 0, features, window)
    second = batch.prefill([0, 0, 6, 6], 8, 2, features, window)
    last = batch.prefill([0, 0, 7, 14], 12, 5, features, window)
    for row, (length, starts) in enumerate(
        zip(batch.lengths, ((0, 0, 0), (0, 0, 0), (0, 6, 7), (0, 6, 14)), strict=True)
    ):
        for start, out in zip(starts, (first, second, last), strict=True):
            count = min(length - start, out.shape[1])
            torch.testing.assert_close(
                out[row, :count].double(), expected[row][start : start + count], atol=1e-5, rtol=1e-5
            )
    out = batch.decode(features, window)
    for row in range(4):
        torch.testing.assert_close(out[row].double(), expected[row][-1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", FEATURES)
def test_a_row_does_not_depend_on_its_neighbours(name: str) -> None:
    features = FEATURES[name]
    batch = Sequences([9, 17], Heads(), CpuDevice(1))
    whole = batch.prefill([0, 0], 20, 0, features, None)
    decoded = batch.decode(features, None)
    with torch.no_grad():
        batch.query[9:] *= 50
        batch.key[9:] *= 50
        batch.value[9:] *= 50
    changed = batch.prefill([0, 0], 20, 0, features, None)
    torch.testing.assert_close(changed[0, :9], whole[0, :9], atol=0, rtol=0)
    torch.testing.assert_close(batch.decode(features, None)[0], decoded[0], atol=0, rtol=0)


@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_that_is_switched_off_shows(name: str) -> None:
    batch = Sequences([13], Heads(), CpuDevice(1))
    plain = batch.prefill([0], 13, 0, FEATURES["plain"], None)
    outs = (batch.prefill([0], 13, 0, FEATURES[name], None), batch.prefill([0], 13, 0, FEATURES[name], 5))
    assert torch.equal(outs[0], plain) is (name == "plain")
    assert not torch.allclose(outs[0], outs[1], atol=1e-3)


def test_long_contexts_are_done_in_slices_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Sequences([23], Heads(), CpuDevice(1))
    whole = batch.prefill([0], 23, 0, FEATURES["all"], 5)
    monkeypatch.setattr(explicit_module, "_MAX_SCORES", 3 * HEADS * 23)
    sliced = batch.prefill([0], 23, 0, FEATURES["all"], 5)
    torch.testing.assert_close(sliced, whole, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_features_in_half_precision(dtype: torch.dtype) -> None:
    batch = Sequences([23, 5], Heads(value_dim=3), CpuDevice(1), dtype)
    expected = [batch.expected(row, FEATURES["all"], None)[-1] for row in range(2)]
    prefill = batch.prefill([0, 0], 23, 0, FEATURES["all"], None)
    decoded = batch.decode(FEATURES["all"], None)
    for row, length in enumerate(batch.lengths):
        torch.testing.assert_close(prefill[row, length - 1].double(), expected[row], atol=0.03, rtol=0.03)
        torch.testing.assert_close(decoded[row].double(), expected[row], atol=0.03, rtol=0.03)


def test_alibi_without_distances_is_refused() -> None:
    batch = Sequences([5], Heads(), CpuDevice(1))
    inputs = PrefillInputs(
        1, BLOCK, torch.zeros(5, dtype=torch.int64), torch.zeros((1, 0), dtype=torch.int64), {None: None}
    )
    with pytest.raises(ValueError, match="needs the distances"):
        attend(
            batch.layer,
            batch.query,
            batch.key,
            batch.value,
            inputs,
            window=None,
            scale=SCALE,
            features=FEATURES["alibi"],
        )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"indices": torch.zeros(1)}, "attention with indices"),
        ({"dropout": 0.1}, "dropout"),
        ({"is_causal": False}, "not causal"),
        ({"attention_mask": torch.zeros(1, 1, 5, 5)}, "a mask of its own"),
        ({}, "without the engine's inputs"),
    ],
)
def test_what_a_layer_asks_and_is_not_done_is_refused(options: dict[str, Any], text: str) -> None:
    heads = torch.zeros(1, 2, 5, 8)
    values: dict[str, Any] = {"attention_mask": None, "use_cache": False, "position_ids": None, **options}
    with pytest.raises(UnsupportedAttention, match=text):
        paged_attention(torch.nn.Module(), heads, heads, heads, **values)
