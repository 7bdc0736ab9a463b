"""Turns a step's rows into padded tensors of their bucket's static shape.

Padding is made harmless here: padded tokens write to the padding block, padded context belongs to it, padded
rows own no block. The padding block is the one after the pool's last. Slots that are masked are zero: the
runner clears what a step begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from services.engine.bucketing import Bucket
from services.engine.device import Device
from services.engine.scheduler import DecodeRow, PrefillChunk


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Where blocks lie in the flat caches."""

    block_size: int
    num_blocks: int

    @property
    def padding_block(self) -> int:
        """Id of the block that takes the writes of padding."""
        return self.num_blocks

    def slot(self, table: Sequence[int], position: int) -> int:
        """Slot of a token by its sequence's block table."""
        return table[position // self.block_size] * self.block_size + position % self.block_size

    def padding_slot(self, index: int) -> int:
        """Slot for the index-th padded token; they take turns, since writes to one slot would queue up."""
        return self.padding_block * self.block_size + index % self.block_size


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


def prefill_tensors(
    chunks: Sequence[PrefillChunk], bucket: Bucket, layout: KvLayout, device: Device
) -> tuple[torch.Tensor, ...]:
    """Arguments of `PagedModel.prefill`, then `keep`: flat indexes of the tokens whose logits are wanted.

    `keep` has as many indexes as rows, or none if no chunk samples.
    """
    batch, query, context = bucket.batch, bucket.query, bucket.context_blocks
    tokens = [0] * (batch * query)
    positions = [0] * (batch * query)
    slots = [layout.padding_slot(index) for index in range(batch * query)]
    blocks: list[list[int]] = []
    keep: list[int] = []
    for row, chunk in enumerate(chunks):
        table = chunk.sequence.block_table
        first, last = row * query, row * query + chunk.length
        tokens[first:last] = chunk.sequence.token_ids[chunk.start : chunk.end]
        positions[first:last] = range(chunk.start, chunk.end)
        slots[first:last] = [layout.slot(table, position) for position in range(chunk.start, chunk.end)]
        cached = table[: -(-chunk.start // layout.block_size)]
        blocks.append([*cached, *[layout.padding_block] * (context - len(cached))])
        if chunk.samples:
            keep.append(last - 1)
    blocks += [[layout.padding_block] * context for _ in range(batch - len(chunks))]
    lengths = [chunk.start for chunk in chunks] + [0] * (batch - len(chunks))
    if keep:
        keep += [0] * (batch - len(keep))
    shaped = torch.tensor(blocks, dtype=torch.int64).view(batch, context)
    return (
        *_tensors(device, tokens, positions, slots),
        device.to_device(shaped),
        *_tensors(device, lengths, keep),
    )


def decode_tensors(
    rows: Sequence[DecodeRow], bucket: Bucket, layout: KvLayout, device: Device
) -> tuple[torch.Tensor, ...]:
    """Arguments of `PagedModel.decode`."""
    size, padded = layout.block_size, bucket.batch - len(rows)
    tokens = [row.sequence.token_ids[row.position] for row in rows] + [0] * padded
    positions = [row.position for row in rows] + [0] * padded
    slots = [layout.slot(row.sequence.block_table, row.position) for row in rows]
    slots += [layout.padding_slot(index) for index in range(padded)]
    blocks: list[int] = []
    owners: list[int] = []
    starts: list[int] = []
    for index, row in enumerate(rows):
        count = row.position // size + 1
        blocks += row.sequence.block_table[:count]
        owners += [index] * count
        starts += range(0, count * size, size)
    missing = bucket.context_blocks - len(blocks)
    blocks += [layout.padding_block] * missing
    owners += [bucket.batch] * missing
    starts += [0] * missing
    return _tensors(device, tokens, positions, slots, blocks, owners, starts)


def _tensors(device: Device, *columns: list[int]) -> tuple[torch.Tensor, ...]:
    return tuple(device.to_device(torch.tensor(column, dtype=torch.int64)) for column in columns)
