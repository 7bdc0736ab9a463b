"""Paged attention with every feature equals plain attention over each sequence alone."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from services.engine.device import CpuDevice
from services.engine.device import explicit as explicit_module
from services.engine.model.attention import (
    AttentionFeatures,
    DecodeInputs,
    LayerCache,
    LayerSpec,
    PrefillInputs,
    attend,
    decode_biases,
    decode_distances,
    prefill_distances,
    prefill_masks,
)
from services.engine.model.transformers_backend import UnsupportedAttention
from services.engine.model.transformers_backend.attention import paged_attention

BLOCK = 4
BLOCKS = 24
HEADS = 6
SCALE = 0.3

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


class Sequences:
    """Random query, key and value of whole sequences, and one layer's paged cache for them."""

    def __init__(self, lengths: list[int], value_dim: int, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(5)
        total = sum(lengths)
        self.lengths = lengths
        self.starts = list(itertools.accumulate(lengths, initial=0))
        self.query = torch.randn(total, HEADS, 8).to(dtype)
        self.key = torch.randn(total, 2, 8).to(dtype)
        self.value = torch.randn(total, 2, value_dim).to(dtype)
        spec = LayerSpec(2, 8, value_dim, None)
        self.layer = LayerCache.allocate(CpuDevice(1), spec, (BLOCKS + 1) * BLOCK, dtype)
        ids = torch.randperm(BLOCKS).tolist()
        self.tables = [[ids.pop() for _ in range(-(-length // BLOCK))] for length in lengths]

    def slots(self, row: int, positions: range) -> list[int]:
        return [self.tables[row][at // BLOCK] * BLOCK + at % BLOCK for at in positions]

    def expected(self, row: int, features: AttentionFeatures, window: int | None) -> torch.Tensor:
        """Plain causal attention over one whole sequence in float64, [length, heads, dv]."""
        first, last = self.starts[row], self.starts[row + 1]
        query = self.query[first:last].double()
        key, value = (
            tensor[first:last].double().repeat_interleave(3, 1) for tensor in (self.key, self.value)
        )
        scores = torch.einsum("qhd,khd->hqk", query, key) * SCALE
        if features.softcap is not None:
            scores = features.softcap * torch.tanh(scores / features.softcap)
        behind = torch.arange(last - first).unsqueeze(1) - torch.arange(last - first)
        if features.alibi is not None:
            scores = scores - features.alibi.double().view(-1, 1, 1) * behind
        hidden = (behind < 0) | (behind >= (window or 10**9))
        scores = scores.masked_fill(hidden, float("-inf"))
        if features.sinks is not None:
            sinks = features.sinks.double().view(-1, 1, 1).expand(HEADS, last - first, 1)
            scores = torch.cat((scores, sinks), -1)
        weights = scores.softmax(-1)[..., : last - first]
        return torch.einsum("hqk,khd->qhd", weights, value)

    def prefill(
        self, starts: list[int], query: int, context: int, features: AttentionFeatures, window: int | None
    ) -> torch.Tensor:
        """One chunk of each sequence from its start on, up to `query` tokens: [rows, query, heads, dv]."""
        rows = len(self.lengths)
        picked, slots = [], []
        for row, start in enumerate(starts):
            end = min(start + query, self.lengths[row])
            padding = query - (end - start)
            picked += [*range(self.starts[row] + start, self.starts[row] + end), *[0] * padding]
            slots += [*self.slots(row, range(start, end)), *[BLOCKS * BLOCK] * padding]
        blocks = [[*table, *[BLOCKS] * context][:context] for table in self.tables]
        lens = torch.tensor(starts)
        inputs = PrefillInputs(
            rows,
            BLOCK,
            torch.tensor(slots),
            torch.tensor(blocks, dtype=torch.int64).view(rows, context),
            prefill_masks([window], lens, query, context * BLOCK),
            prefill_distances(lens, query, context * BLOCK) if features.alibi is not None else None,
        )
        index = torch.tensor(picked)
        tensors = (self.query[index], self.key[index], self.value[index])
        out = attend(self.layer, *tensors, inputs, window=window, scale=SCALE, features=features)
        return out.view(rows, query, HEADS, -1)

    def decode(self, features: AttentionFeatures, window: int | None, padded: int = 2) -> torch.Tensor:
        """The last token of every sequence, with padded rows and blocks: [rows, heads, dv]."""
        rows = len(self.lengths)
        blocks, owners, starts = [], [], []
        for row, table in enumerate(self.tables):
            blocks += table
            owners += [row] * len(table)
            starts += range(0, len(table) * BLOCK, BLOCK)
        batch = rows + padded
        block_rows = torch.tensor(owners + [batch] * padded)
        block_starts = torch.tensor(starts + [0] * padded)
        positions = torch.tensor([length - 1 for length in self.lengths] + [0] * padded)
        slots = [self.slots(row, range(length - 1, length))[0] for row, length in enumerate(self.lengths)]
        distances = None
        if features.alibi is not None:
            distances = decode_distances(positions, block_rows, block_starts, BLOCK)
        inputs = DecodeInputs(
            torch.tensor(slots + [BLOCKS * BLOCK] * padded),
            torch.tensor(blocks + [BLOCKS] * padded),
            block_rows,
            decode_biases([window], positions, block_rows, block_starts, BLOCK),
            distances,
        )
        index = torch.tensor([last - 1 for last in self.starts[1:]] + [0] * padded)
        tensors = (self.query[index], self.key[index], self.value[index])
        return attend(self.layer, *tensors, inputs, window=window, scale=SCALE, features=features)[:rows]


@pytest.mark.parametrize(("name", "window", "value_dim"), CASES)
def test_chunks_and_decode_equal_plain_attention(name: str, window: int | None, value_dim: int) -> None:
    features = FEATURES[name]
    batch = Sequences([1, 5, 13, 23], value_dim)
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
    batch = Sequences([9, 17], 8)
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
    batch = Sequences([13], 8)
    plain = batch.prefill([0], 13, 0, FEATURES["plain"], None)
    outs = (batch.prefill([0], 13, 0, FEATURES[name], None), batch.prefill([0], 13, 0, FEATURES[name], 5))
    assert torch.equal(outs[0], plain) is (name == "plain")
    assert not torch.allclose(outs[0], outs[1], atol=1e-3)


def test_long_contexts_are_done_in_slices_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Sequences([23], 8)
    whole = batch.prefill([0], 23, 0, FEATURES["all"], 5)
    monkeypatch.setattr(explicit_module, "_MAX_SCORES", 3 * HEADS * 23)
    sliced = batch.prefill([0], 23, 0, FEATURES["all"], 5)
    torch.testing.assert_close(sliced, whole, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_features_in_half_precision(dtype: torch.dtype) -> None:
    batch = Sequences([23, 5], 3, dtype)
    expected = [batch.expected(row, FEATURES["all"], None)[-1] for row in range(2)]
    prefill = batch.prefill([0, 0], 23, 0, FEATURES["all"], None)
    decoded = batch.decode(FEATURES["all"], None)
    for row, length in enumerate(batch.lengths):
        torch.testing.assert_close(prefill[row, length - 1].double(), expected[row], atol=0.03, rtol=0.03)
        torch.testing.assert_close(decoded[row].double(), expected[row], atol=0.03, rtol=0.03)


def test_alibi_without_distances_is_refused() -> None:
    batch = Sequences([5], 8)
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
