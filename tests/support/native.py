"""Decoders that the native kernels of the CPU compute, and batches of unlike sequences for them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from services.engine.device.cpu import CpuDevice, CpuSettings, KernelChoice, Quantization
from services.engine.model.decoder import NativeDecoderModel
from services.engine.model.open_model import open_model

BLOCK = 8


def open_native(
    directory: Path, dtype: str = "float32", *, threads: int = 1, quantization: Quantization | None = None
) -> NativeDecoderModel:
    """The checkpoint, packed for the native kernels."""
    device = CpuDevice(threads, settings=CpuSettings(KernelChoice.NATIVE, quantization))
    model = open_model(directory, device, dtype=dtype, max_model_len=256, backend="decoder")
    if not isinstance(model, NativeDecoderModel):
        raise AssertionError(f"not native: {model.backend}")
    return model


@dataclass
class Paged:
    """Sequences in scattered blocks of one cache: forwards over them as a runner makes them."""

    model: NativeDecoderModel
    texts: Sequence[Sequence[int]]
    tables: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        counts = [len(text) // BLOCK + 1 for text in self.texts]
        self.spare = sum(counts) + 3
        ids = list(range(self.spare))
        random.Random(4).shuffle(ids)
        self.tables = [[ids.pop() for _ in range(count)] for count in counts]
        self.model.allocate_kv(self.spare, BLOCK)

    def prefill(self, chunks: dict[int, range], *, query: int, context: int) -> list[torch.Tensor]:
        """One forward of these rows' tokens, padded to `query` tokens, `context` blocks and one more row."""
        given = self._prefill(chunks, query, context)
        hidden = self.model.prefill(*given).view(len(chunks) + 1, query, -1)
        if hidden[-1].any():
            raise AssertionError("padding was computed")
        return [hidden[index, : len(chunk)] for index, chunk in enumerate(chunks.values())]

    def select(
        self, chunks: dict[int, range], wanted: Sequence[tuple[int, int]], *, query: int, context: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same forward for the hidden states of these (index of a row, index in its chunk).

        Returns them, [N, hidden], and which rows are sound, [rows + 1].
        """
        places = torch.tensor([index * query + at for index, at in wanted], dtype=torch.int64)
        select: Any = self.model.native.select
        hidden, sound = select(*self._prefill(chunks, query, context), places)
        return hidden, sound.view(len(chunks) + 1, query).all(-1)

    def _prefill(self, chunks: dict[int, range], query: int, context: int) -> tuple[torch.Tensor, ...]:
        tokens, positions, slots = [], [], []
        blocks, starts = [], []
        for row, chunk in chunks.items():
            padding = query - len(chunk)
            tokens += [*self.texts[row][chunk.start : chunk.stop], *[0] * padding]
            positions += [*chunk, *[0] * padding]
            slots += [*(self._slot(row, at) for at in chunk), *[self.spare * BLOCK] * padding]
            cached = -(-chunk.start // BLOCK)
            blocks += [*self.tables[row][:cached], *[self.spare] * (context - cached)]
            starts.append(chunk.start)
        tokens, positions = tokens + [0] * query, positions + [0] * query
        slots += [self.spare * BLOCK] * query
        blocks += [self.spare] * context
        starts.append(0)
        table = torch.tensor(blocks, dtype=torch.int64).view(len(starts), context)
        numbers = (torch.tensor(tokens), torch.tensor(positions), torch.tensor(slots))
        return *numbers, table, torch.tensor(starts)

    def written(self) -> torch.Tensor:
        """All that the caches hold."""
        return torch.cat([part.flatten() for cache in self.model.caches for part in (cache.key, cache.value)])

    def decode(self, ats: dict[int, int]) -> list[torch.Tensor]:
        """One forward of a token of each of these rows."""
        return list(self.model.decode(*self.decode_inputs(ats))[: len(ats)].unsqueeze(1))

    def decode_inputs(self, ats: dict[int, int]) -> tuple[torch.Tensor, ...]:
        """The arguments of such a forward; entries are shuffled, rows and blocks padded."""
        count = len(ats)
        entries = [
            (self.tables[row][index], number, index * BLOCK)
            for number, (row, at) in enumerate(ats.items())
            for index in range(at // BLOCK + 1)
        ]
        entries += [(self.spare, count + 1, 0)] * 3
        random.Random(8).shuffle(entries)
        return (
            torch.tensor([self.texts[row][at] for row, at in ats.items()] + [0]),
            torch.tensor([*ats.values(), 0]),
            torch.tensor([self._slot(row, at) for row, at in ats.items()] + [self.spare * BLOCK]),
            *(torch.tensor(column) for column in zip(*entries, strict=True)),
        )

    def _slot(self, row: int, at: int) -> int:
        return self.tables[row][at // BLOCK] * BLOCK + at % BLOCK


def in_pieces(model: NativeDecoderModel, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Logits [T, vocab] of each text: chunks that end within blocks, then decodes of what still goes on."""
    paged = Paged(model, texts)
    parts: list[list[torch.Tensor]] = [[] for _ in texts]
    first = {row: range(0, min(len(text), 11)) for row, text in enumerate(texts)}
    longer = [row for row, text in enumerate(texts) if len(text) > 11]
    # The last three tokens are decoded.
    second = {row: range(11, max(12, len(texts[row]) - 3)) for row in longer}
    forwards = [(first, paged.prefill(first, query=13, context=0))]
    if second:
        query = max(map(len, second.values())) + 1
        forwards.append((second, paged.prefill(second, query=query, context=4)))
    for chunks, states in forwards:
        for row, hidden in zip(chunks, states, strict=True):
            parts[row].append(hidden)
    while ats := {row: at for row in longer if (at := _done(parts[row])) < len(texts[row])}:
        for row, hidden in zip(ats, paged.decode(ats), strict=True):
            parts[row].append(hidden)
    return [model.logits(torch.cat(hidden)) for hidden in parts]


def _done(parts: list[torch.Tensor]) -> int:
    return sum(part.shape[0] for part in parts)
