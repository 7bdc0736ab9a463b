"""Random sequences over one layer's paged cache on any device, and what attention over them must give."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch

from services.engine.device import Device
from services.engine.model.paged import (
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

SCALE = 0.3


@dataclass(frozen=True, slots=True)
class Heads:
    """A layer's heads and their sizes, and tokens of a block."""

    heads: int = 6
    kv_heads: int = 2
    dim: int = 8
    value_dim: int = 8
    block: int = 4

    def features(self, *names: str) -> AttentionFeatures:
        """Those named, of softcap, sinks and alibi, with numbers that show."""
        return AttentionFeatures(
            softcap=1.3 if "softcap" in names else None,
            sinks=torch.linspace(-1, 2, self.heads) if "sinks" in names else None,
            alibi=torch.linspace(0.01, 0.4, self.heads) if "alibi" in names else None,
        )


class Sequences:
    """Random query, key and value of whole sequences, and one layer's paged cache for them.

    `spare` blocks more than they need are scattered between those in use.
    """

    def __init__(
        self,
        lengths: list[int],
        heads: Heads,
        device: Device,
        dtype: torch.dtype = torch.float32,
        spare: int = 5,
    ) -> None:
        generator = torch.Generator().manual_seed(5)
        total = sum(lengths)
        self.lengths, self.heads, self.device = lengths, heads, device
        self.starts = list(itertools.accumulate(lengths, initial=0))
        sizes = ((heads.heads, heads.dim), (heads.kv_heads, heads.dim), (heads.kv_heads, heads.value_dim))
        self.query, self.key, self.value = (
            torch.randn(total, *size, generator=generator).to(dtype) for size in sizes
        )
        counts = [-(-length // heads.block) for length in lengths]
        self.blocks = sum(counts) + spare
        spec = LayerSpec(heads.kv_heads, heads.dim, heads.value_dim, None)
        self.layer = LayerCache.allocate(device, spec, (self.blocks + 1) * heads.block, dtype)
        ids = torch.randperm(self.blocks, generator=generator).tolist()
        self.tables = [[ids.pop() for _ in range(count)] for count in counts]

    def slots(self, row: int, positions: range) -> list[int]:
        """Where a sequence's tokens lie in the cache."""
        block = self.heads.block
        return [self.tables[row][at // block] * block + at % block for at in positions]

    def expected(self, row: int, features: AttentionFeatures, window: int | None) -> torch.Tensor:
        """Plain causal attention over one whole sequence in float64, [length, heads, dv]."""
        first, last = self.starts[row], self.starts[row + 1]
        query = self.query[first:last].double()
        repeat = self.heads.heads // self.heads.kv_heads
        key, value = (
            tensor[first:last].double().repeat_interleave(repeat, 1) for tensor in (self.key, self.value)
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
            sinks = features.sinks.double().view(-1, 1, 1).expand(self.heads.heads, last - first, 1)
            scores = torch.cat((scores, sinks), -1)
        weights = scores.softmax(-1)[..., : last - first]
        return torch.einsum("hqk,khd->qhd", weights, value)

    def prefill(
        self, starts: list[int], query: int, context: int, features: AttentionFeatures, window: int | None
    ) -> torch.Tensor:
        """One chunk of each sequence from its start on, up to `query` tokens: [rows, query, heads, dv]."""
        rows, block = len(self.lengths), self.heads.block
        picked, slots, lengths = [], [], []
        for row, start in enumerate(starts):
            end = min(start + query, self.lengths[row])
            padding = query - (end - start)
            picked += [*range(self.starts[row] + start, self.starts[row] + end), *[0] * padding]
            slots += [*self.slots(row, range(start, end)), *[self.blocks * block] * padding]
            lengths.append(end - start)
        blocks = [[*table, *[self.blocks] * context][:context] for table in self.tables]
        lens = self._put(starts)
        inputs = PrefillInputs(
            rows,
            block,
            self._put(slots),
            self._put(blocks).view(rows, context),
            prefill_masks([window], lens, query, context * block),
            prefill_distances(lens, query, context * block) if features.alibi is not None else None,
            None if context else self._put(lengths),
        )
        return self._attend(picked, inputs, features, window).view(rows, query, self.heads.heads, -1)

    def decode(
        self, features: AttentionFeatures, window: int | None, *, padded: int = 2, contiguous: bool = False
    ) -> torch.Tensor:
        """The last token of every sequence, with padded rows and blocks: [rows, heads, dv].

        contiguous: the cache's first blocks as one slice, whoever owns them.
        """
        rows, block = len(self.lengths), self.heads.block
        batch = rows + padded
        entries = [
            (table[index], row, index * block)
            for row, table in enumerate(self.tables)
            for index in range(len(table))
        ]
        if contiguous:
            found = {entry[0]: entry for entry in entries}
            entries = [found.get(id_, (id_, batch, 0)) for id_ in range(max(found) + 1)]
        else:
            entries += [(self.blocks, batch, 0)] * padded
        owners, starts = (
            self._put([entry[1] for entry in entries]),
            self._put([entry[2] for entry in entries]),
        )
        positions = self._put([length - 1 for length in self.lengths] + [0] * padded)
        slots = [self.slots(row, range(length - 1, length))[0] for row, length in enumerate(self.lengths)]
        inputs = DecodeInputs(
            self._put(slots + [self.blocks * block] * padded),
            self._put([] if contiguous else [entry[0] for entry in entries]),
            owners,
            decode_biases([window], positions, owners, starts, block),
            decode_distances(positions, owners, starts, block) if features.alibi is not None else None,
        )
        picked = [last - 1 for last in self.starts[1:]] + [0] * padded
        return self._attend(picked, inputs, features, window)[:rows]

    def _attend(
        self,
        picked: list[int],
        inputs: PrefillInputs | DecodeInputs,
        features: AttentionFeatures,
        window: int | None,
    ) -> torch.Tensor:
        index, to = torch.tensor(picked), self.device.torch_device
        there = replace(
            features,
            sinks=None if features.sinks is None else features.sinks.to(to),
            alibi=None if features.alibi is None else features.alibi.to(to),
        )
        query, key, value = (tensor[index].to(to) for tensor in (self.query, self.key, self.value))
        out = attend(self.layer, query, key, value, inputs, window=window, scale=SCALE, features=there)
        return out.cpu()

    def _put(self, values: list[int] | list[list[int]]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self.device.torch_device)
