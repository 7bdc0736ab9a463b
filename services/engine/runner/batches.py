"""Rows of a step as padded tensors of their bucket's static shape, sent to the device as one.

Padding is made harmless here: padded tokens write to the padding block, padded context belongs to it, padded
rows own no block and leave their hidden states in a row that is never read. Slots that are masked are zero:
the runner clears what a step begins.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from services.engine.bucketing import Bucket
from services.engine.device import Device
from services.engine.kv import BlockMove
from services.engine.sampling import MaskBuffer
from services.engine.scheduler import DecodeRow, PrefillChunk, Sequence


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Layout of the flat caches: `num_blocks` blocks of the pool, then the padding block.

    `contiguous`: a decode reads the caches' first blocks as one slice, of all sequences.
    """

    block_size: int
    num_blocks: int
    contiguous: bool = False

    @property
    def padding_block(self) -> int:
        """Id of the block that takes the writes of padding."""
        return self.num_blocks

    @property
    def padding_start(self) -> int:
        """First slot of the padding block: slots from here on belong to no sequence."""
        return self.num_blocks * self.block_size


def static_counts(largest: int) -> tuple[int, ...]:
    """Return the counts that shapes may have: the powers of two below `largest`, and `largest`."""
    powers = (1 << exponent for exponent in range(largest.bit_length()))
    return (*(power for power in powers if power < largest), largest)


def padded_count(count: int, counts: tuple[int, ...]) -> int:
    """Return the smallest of the rising `counts` that holds `count`. Raises ValueError if none does."""
    index = bisect_left(counts, count)
    if index == len(counts):
        raise ValueError(f"a step has {count} rows and its shapes hold {counts[-1]}")
    return counts[index]


Ints = np.ndarray[Any, np.dtype[np.int64]]

# Sections begin at multiples of so many numbers, 128 bytes: accelerators read aligned memory faster.
_ALIGNMENT = 16
_FIRST_CAPACITY = 1024


@dataclass(frozen=True, slots=True)
class Staged:
    """Inputs on the device: sections (start, length) of one int64 tensor, the only input of a graph."""

    tensor: torch.Tensor
    sections: tuple[tuple[int, int], ...]

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the sections."""
        return _split(self.sections, self.tensor)

    def taking(self, forward: Callable[..., Any]) -> Callable[[torch.Tensor], Any]:
        """Return `forward`, which takes the sections, as a function of the one tensor, cut up inside."""
        sections = self.sections
        return lambda tensor: forward(*_split(sections, tensor))


def _split(sections: tuple[tuple[int, int], ...], tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(tensor[start : start + length] for start, length in sections)


class StagingBuffer:
    """One group of int64 inputs. It may be filled again once the step that was sent from it is finished."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._host = device.memory.host_buffer(_FIRST_CAPACITY)
        self._sections: list[tuple[int, int]] = []

    def lay_out(self, *lengths: int) -> tuple[Ints, ...]:
        """Return sections of these lengths, with undefined contents, for the caller to fill."""
        self._sections = []
        end = 0
        for length in lengths:
            self._sections.append((end, length))
            end += -(-length // _ALIGNMENT) * _ALIGNMENT
        if end > self._host.numel():
            # Copies that are under way keep the old one alive.
            self._host = self._device.memory.host_buffer(1 << (end - 1).bit_length())
        array: Ints = self._host.numpy()
        return tuple(array[start : start + length] for start, length in self._sections)

    def send(self) -> Staged:
        """Copy the sections to the device, in one copy."""
        start, length = self._sections[-1]
        return Staged(self._device.memory.to_device(self._host[: start + length]), tuple(self._sections))


class StepStaging:
    """Groups of inputs of one step."""

    def __init__(self, device: Device) -> None:
        self.prefill = StagingBuffer(device)
        self.decode = StagingBuffer(device)
        self.moves = StagingBuffer(device)
        self.clear = StagingBuffer(device)
        self.masks = MaskBuffer(device)


_FIRST_WIDTH = 16


class BlockTables:
    """Row `sequence.row` holds the first blocks of the table of the sequence that has the row now.

    A table list only grows, and another list takes its place when a sequence gets other blocks: so an update
    copies what is new.
    """

    def __init__(self, rows: int) -> None:
        self.ids: Ints = np.zeros((rows, _FIRST_WIDTH), dtype=np.int64)
        self._tables: list[list[int] | None] = [None] * rows
        self._known = [0] * rows

    def update(self, sequence: Sequence, count: int) -> None:
        """Make the first `count` blocks of the sequence's table known."""
        row, table = sequence.row, sequence.block_table
        if self._tables[row] is not table:
            self._tables[row] = table
            self._known[row] = 0
        known = self._known[row]
        if known < count:
            while count > self.ids.shape[1]:
                self.ids = np.concatenate((self.ids, np.zeros_like(self.ids)), axis=1)
            self.ids[row, known:count] = table[known:count]
            self._known[row] = count


# In place of a token that is still on the device.
PENDING = -1


class BatchBuilder:
    """Builds the inputs of forwards. `spare_row` is the row of the device buffers that takes padding."""

    def __init__(self, layout: KvLayout, tables: BlockTables, spare_row: int) -> None:
        self._layout = layout
        self._tables = tables
        self._spare_row = spare_row

    def prefill(self, chunks: Items[PrefillChunk], bucket: Bucket, staging: StagingBuffer) -> Staged:
        """Lay out the first five arguments of `PagedModel.prefill`, the fourth one flat, then picks and
        targets, int64 [B] each.

        The hidden state of flat token picks[b] goes to row targets[b] of the buffer: sampling chunks have its
        first rows, in order.
        """
        batch, query, context = bucket.batch, bucket.query, bucket.context_blocks
        size, padding = self._layout.block_size, self._layout.padding_block
        count = batch * query
        sections = staging.lay_out(count, count, count, batch * context, batch, batch, batch)
        tokens, positions, slots, blocks, lengths, picks, targets = sections
        tokens[:] = 0
        positions[:] = 0
        slots[:] = self._padding_slots(count)
        blocks[:] = padding
        lengths[:] = 0
        picks[:] = 0
        targets[:] = self._spare_row
        sampled = 0
        for row, chunk in enumerate(chunks):
            first, last = row * query, row * query + chunk.length
            self._tables.update(chunk.sequence, -(-chunk.end // size))
            table = self._tables.ids[chunk.sequence.row]
            at = np.arange(chunk.start, chunk.end)
            tokens[first:last] = chunk.sequence.token_ids[chunk.start : chunk.end]
            positions[first:last] = at
            slots[first:last] = table[at // size] * size + at % size
            cached = -(-chunk.start // size)
            blocks[row * context : row * context + cached] = table[:cached]
            lengths[row] = chunk.start
            if chunk.samples:
                picks[row] = last - 1
                targets[row] = sampled
                sampled += 1
        return staging.send()

    def decode(
        self, rows: Items[DecodeRow], bucket: Bucket, first_target: int, staging: StagingBuffer
    ) -> Staged:
        """Lay out the arguments of `PagedModel.decode`, then rows of last tokens and targets, int64 [B] each.

        A token that is PENDING is taken from its row of the last tokens. Hidden states go to the rows
        targets[b] of the buffer, from `first_target` on.
        """
        batch, total, count = bucket.batch, bucket.context_blocks, len(rows)
        size = self._layout.block_size
        # A slice cannot reach beyond the caches.
        listed = 0 if self._layout.contiguous and total <= self._layout.num_blocks else total
        sections = staging.lay_out(batch, batch, batch, listed, total, total, batch, batch)
        tokens, positions, slots, blocks, owners, starts, last_rows, targets = sections
        tokens[:count] = [PENDING if row.token is None else row.token for row in rows]
        tokens[count:] = 0
        at = positions[:count]
        at[:] = [row.position for row in rows]
        positions[count:] = 0
        last_rows[:count] = [row.sequence.row for row in rows]
        last_rows[count:] = self._spare_row
        targets[:count] = np.arange(first_target, first_target + count)
        targets[count:] = self._spare_row
        last_block = at // size
        for row, index in zip(rows, last_block.tolist(), strict=True):
            self._tables.update(row.sequence, index + 1)
        table = self._tables.ids
        slots[:count] = table[last_rows[:count], last_block] * size + at % size
        slots[count:] = self._padding_slots(batch - count)
        self._fill_blocks(table, last_rows[:count], last_block + 1, (blocks, owners, starts), batch)
        return staging.send()

    def moves(self, moves: Items[BlockMove], count: int, staging: StagingBuffer) -> Staged:
        """Lay out sources, targets and tokens of block copies, int64 [count], then padding blocks."""
        sources, targets, tokens = staging.lay_out(count, count, count)
        size = self._layout.block_size
        sources[: len(moves)] = [move.source for move in moves]
        targets[: len(moves)] = [move.target for move in moves]
        tokens[: len(moves)] = [size if move.tokens is None else move.tokens for move in moves]
        sources[len(moves) :] = targets[len(moves) :] = self._layout.padding_block
        tokens[len(moves) :] = 0
        return staging.send()

    def ids(self, ids: list[int], padding: int, count: int, staging: StagingBuffer) -> Staged:
        """Lay out `ids`, then `padding` as often as it takes: int64 [count]."""
        (section,) = staging.lay_out(count)
        section[: len(ids)] = ids
        section[len(ids) :] = padding
        return staging.send()

    def _fill_blocks(
        self, table: Ints, rows: Ints, counts: Ints, sections: tuple[Ints, Ints, Ints], batch: int
    ) -> None:
        """Fill a decode's lists of blocks: of the k-th row the first counts[k] of its table.

        Without a list of ids, for a slice, they stand where their ids are, and the entries between them
        belong to no row.
        """
        blocks, owners, starts = sections
        used, size = int(counts.sum()), self._layout.block_size
        # Entry e is block e - first[k] of the k-th row.
        first = counts.cumsum() - counts
        entries = np.arange(used)
        ids = table.ravel().take(entries + (rows * table.shape[1] - first).repeat(counts))
        at: Ints | slice = slice(0, used) if len(blocks) else ids
        owners[:] = batch
        owners[at] = np.arange(len(counts)).repeat(counts)
        starts[:] = 0
        starts[at] = (entries - first.repeat(counts)) * size
        if len(blocks):
            blocks[:used] = ids
            blocks[used:] = self._layout.padding_block

    def _padding_slots(self, count: int) -> Ints:
        """Return the slots of padded tokens; they take turns, since writes to one slot would queue up."""
        return np.arange(count) % self._layout.block_size + self._layout.padding_start


def begun_by_prefill(chunks: Items[PrefillChunk], layout: KvLayout) -> list[int]:
    """Return the blocks that these chunks begin and do not fill: at most one each, its last."""
    size = layout.block_size
    return [
        chunk.sequence.block_table[chunk.end // size]
        for chunk in chunks
        if chunk.end % size and chunk.end // size * size >= chunk.start
    ]


def begun_by_decode(rows: Items[DecodeRow], layout: KvLayout) -> list[int]:
    """Return the blocks of which these rows write the first slot."""
    size = layout.block_size
    return [row.sequence.block_table[row.position // size] for row in rows if not row.position % size]
