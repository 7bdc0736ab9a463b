"""Turns a step's rows into padded tensors of their bucket's static shape.

Padding is made harmless here: padded tokens write to the padding block, padded context belongs to it, padded
rows own no block and leave their hidden states in a row that nobody reads. Slots that are masked are zero:
the runner clears what a step begins.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from services.engine.bucketing import Bucket
from services.engine.kv import BlockMove
from services.engine.runner.layout import KvLayout
from services.engine.runner.staging import Ints, Staged, StagingBuffer
from services.engine.runner.tables import BlockTables
from services.engine.scheduler import DecodeRow, PrefillChunk

# In place of a token that is still on the device.
PENDING = -1


class BatchBuilder:
    """Builds the inputs of forwards. `spare_row` is the row of the device buffers that takes padding."""

    def __init__(self, layout: KvLayout, tables: BlockTables, spare_row: int) -> None:
        self._layout = layout
        self._tables = tables
        self._spare_row = spare_row

    def prefill(self, chunks: Sequence[PrefillChunk], bucket: Bucket, staging: StagingBuffer) -> Staged:
        """The first five arguments of `PagedModel.prefill`, the fourth one flat, then picks and targets,
        int64 [B] each.

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
        self, rows: Sequence[DecodeRow], bucket: Bucket, first_target: int, staging: StagingBuffer
    ) -> Staged:
        """The arguments of `PagedModel.decode`, then rows of last tokens and targets, int64 [B] each.

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

    def moves(self, moves: Sequence[BlockMove], count: int, staging: StagingBuffer) -> Staged:
        """Sources, targets and tokens of block copies, int64 [count] each, padded with the padding block."""
        sources, targets, tokens = staging.lay_out(count, count, count)
        size = self._layout.block_size
        sources[: len(moves)] = [move.source for move in moves]
        targets[: len(moves)] = [move.target for move in moves]
        tokens[: len(moves)] = [size if move.tokens is None else move.tokens for move in moves]
        sources[len(moves) :] = targets[len(moves) :] = self._layout.padding_block
        tokens[len(moves) :] = 0
        return staging.send()

    def ids(self, ids: list[int], padding: int, count: int, staging: StagingBuffer) -> Staged:
        """int64 [count]: `ids`, then as many times `padding` as it takes."""
        (section,) = staging.lay_out(count)
        section[: len(ids)] = ids
        section[len(ids) :] = padding
        return staging.send()

    def _fill_blocks(
        self, table: Ints, rows: Ints, counts: Ints, sections: tuple[Ints, Ints, Ints], batch: int
    ) -> None:
        """Fills a decode's lists of blocks: of the k-th row the first counts[k] of its table.

        Without a list of ids, for a slice, they stand where their ids are, and what is between them belongs
        to nobody.
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
        """Slots of padded tokens; they take turns, since writes to one slot would queue up."""
        return np.arange(count) % self._layout.block_size + self._layout.padding_start


def begun_by_prefill(chunks: Sequence[PrefillChunk], layout: KvLayout) -> list[int]:
    """Blocks that these chunks begin and do not fill: at most one each, its last."""
    size = layout.block_size
    return [
        chunk.sequence.block_table[chunk.end // size]
        for chunk in chunks
        if chunk.end % size and chunk.end // size * size >= chunk.start
    ]


def begun_by_decode(rows: Sequence[DecodeRow], layout: KvLayout) -> list[int]:
    """Blocks of which these rows write the first slot."""
    size = layout.block_size
    return [row.sequence.block_table[row.position // size] for row in rows if not row.position % size]
