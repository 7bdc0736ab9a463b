"""A step's inputs are what their plain definition says, whatever is reused between steps."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.bucketing import Bucket
from services.engine.device.cpu import CpuDevice
from services.engine.domain import SamplingOptions
from services.engine.runner.batches import (
    PENDING,
    BatchBuilder,
    BlockTables,
    KvLayout,
    StagingBuffer,
    begun_by_decode,
    begun_by_prefill,
    padded_count,
    static_counts,
)
from services.engine.runner.exact import PackedCopy
from services.engine.runner.tail import scored_places, slice_rows
from services.engine.sampling import Counts, Program
from services.engine.scheduler import DecodeRow, PrefillChunk, Sequence, SequenceParams

DEVICE = CpuDevice(1)
ROWS = 6


def sequence(
    row: int, length: int, blocks: list[int], *, prompt_len: int = 1, sampling: SamplingOptions | None = None
) -> Sequence:
    params = SequenceParams(8, sampling=sampling or SamplingOptions())
    made = Sequence(row, [100 * row + index for index in range(length)], prompt_len, params)
    made.row = row
    made.block_table = blocks
    return made


class Setting:
    """Builders that live on, as in a runner, and sequences with random tables."""

    def __init__(self, seed: int, block_size: int) -> None:
        self.rng = random.Random(seed)
        self.layout = KvLayout(block_size, 400)
        self.builder = BatchBuilder(self.layout, BlockTables(ROWS), ROWS)
        self.staging = StagingBuffer(DEVICE)

    def sequences(self, count: int) -> list[Sequence]:
        free = self.rng.sample(range(400), 400)
        rows = self.rng.sample(range(ROWS), count)
        made: list[Sequence] = []
        for row in rows:
            length = self.rng.randint(1, 20 * self.layout.block_size)
            blocks = [free.pop() for _ in range(-(-length // self.layout.block_size))]
            made.append(sequence(row, length, blocks))
        return made

    def slot(self, one: Sequence, position: int) -> int:
        size = self.layout.block_size
        return one.block_table[position // size] * size + position % size


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10_000), st.sampled_from([1, 4, 16]), st.integers(1, ROWS), st.integers(0, 3))
def test_decode_inputs(seed: int, block_size: int, count: int, spare: int) -> None:
    setting = Setting(seed, block_size)
    # The second round has other sequences in the same rows, and the memory of the first.
    for _ in range(2):
        rows = [
            DecodeRow(one, len(one.token_ids) - 1, False, setting.rng.choice([None, one.token_ids[-1]]))
            for one in setting.sequences(count)
        ]
        owned = [block for row in rows for block in row.sequence.block_table]
        bucket = Bucket(count + spare, 1, len(owned) + 2 * spare)
        tensors = setting.builder.decode(rows, bucket, 2, setting.staging).tensors()
        tokens, positions, slots, blocks, owners, starts, last_rows, targets = (t.tolist() for t in tensors)
        padding = [setting.layout.padding_block] * (2 * spare)
        assert tokens == [PENDING if row.token is None else row.token for row in rows] + [0] * spare
        assert positions == [row.position for row in rows] + [0] * spare
        assert slots[:count] == [setting.slot(row.sequence, row.position) for row in rows]
        assert all(slot // block_size == setting.layout.padding_block for slot in slots[count:])
        assert blocks == owned + padding
        counts = [len(row.sequence.block_table) for row in rows]
        assert owners == [k for k, n in enumerate(counts) for _ in range(n)] + [bucket.batch] * len(padding)
        assert starts == [k * block_size for n in counts for k in range(n)] + [0] * len(padding)
        assert last_rows == [row.sequence.row for row in rows] + [ROWS] * spare
        assert targets == [*range(2, 2 + count), *[ROWS] * spare]


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10_000), st.sampled_from([1, 4, 16]), st.integers(1, ROWS), st.integers(0, 2))
def test_prefill_inputs(seed: int, block_size: int, count: int, spare: int) -> None:
    setting = Setting(seed, block_size)
    for _ in range(2):
        chunks: list[PrefillChunk] = []
        for one in setting.sequences(count):
            start = setting.rng.randrange(len(one.token_ids))
            length = setting.rng.randint(1, len(one.token_ids) - start)
            chunks.append(PrefillChunk(one, start, length, start + length == len(one.token_ids), False))
        query = max(chunk.length for chunk in chunks) + spare
        context = max(-(-chunk.start // block_size) for chunk in chunks) + spare
        bucket = Bucket(count + spare, query, context)
        tensors = setting.builder.prefill(chunks, bucket, setting.staging).tensors()
        tokens, positions, slots, blocks, lengths, picks, targets = (t.tolist() for t in tensors)
        assert len(blocks) == bucket.batch * context
        assert lengths == [chunk.start for chunk in chunks] + [0] * spare
        sampling = [k for k, chunk in enumerate(chunks) if chunk.samples]
        for row, chunk in enumerate(chunks):
            own = slice(row * query, row * query + chunk.length)
            assert tokens[own] == chunk.sequence.token_ids[chunk.start : chunk.end]
            assert positions[own] == list(range(chunk.start, chunk.end))
            assert slots[own] == [setting.slot(chunk.sequence, p) for p in range(chunk.start, chunk.end)]
            rest = slots[row * query + chunk.length : (row + 1) * query]
            assert all(slot // block_size == setting.layout.padding_block for slot in rest)
            cached = -(-chunk.start // block_size)
            before = blocks[row * context : (row + 1) * context]
            assert before[:cached] == chunk.sequence.block_table[:cached]
            assert set(before[cached:]) <= {setting.layout.padding_block}
            assert targets[row] == (sampling.index(row) if chunk.samples else ROWS)
            assert picks[row] == (row * query + chunk.length - 1 if chunk.samples else 0)
        assert targets[count:] == [ROWS] * spare


def test_a_table_that_grows_or_is_replaced_is_known() -> None:
    tables = BlockTables(2)
    one = sequence(1, 1, [7, 8])
    tables.update(one, 2)
    one.block_table += list(range(20, 60))
    tables.update(one, 42)
    assert tables.ids[1, :42].tolist() == one.block_table
    one.block_table = [3, 4, 5]
    tables.update(one, 3)
    assert tables.ids[1, :3].tolist() == [3, 4, 5]
    other = sequence(1, 1, [9])
    tables.update(other, 1)
    assert tables.ids[1, 0] == 9


def test_blocks_that_a_step_begins() -> None:
    layout = KvLayout(4, 99)
    one = sequence(0, 30, [10, 11, 12, 13, 14, 15, 16, 17])

    def begun(start: int, length: int) -> list[int]:
        return begun_by_prefill([PrefillChunk(one, start, length, False, False)], layout)

    assert begun(0, 3) == [10]
    assert begun(0, 8) == []
    assert begun(0, 9) == [12]
    # It goes on in a block that the chunk before it began.
    assert begun(5, 2) == []
    assert begun(5, 4) == [12]
    rows = [DecodeRow(one, position, False, 1) for position in (3, 4, 8, 9)]
    assert begun_by_decode(rows, layout) == [11, 12]


@pytest.mark.parametrize("largest", [1, 2, 3, 8, 33, 256])
def test_static_counts_cover(largest: int) -> None:
    counts = static_counts(largest)
    assert counts == tuple(sorted(set(counts)))
    for count in range(1, largest + 1):
        padded = padded_count(count, counts)
        assert count <= padded < max(2 * count, 2)
    with pytest.raises(ValueError, match=f"{largest + 1} rows"):
        padded_count(largest + 1, counts)


def test_a_buffer_is_filled_again_and_grows() -> None:
    staging = StagingBuffer(DEVICE)
    first, second = staging.lay_out(3, 5)
    first[:] = 1
    second[:] = range(5)
    sent = staging.send().tensors()
    assert [tensor.tolist() for tensor in sent] == [[1, 1, 1], [0, 1, 2, 3, 4]]
    (large,) = staging.lay_out(5000)
    large[:] = 7
    assert staging.send().tensors()[0].sum() == 35_000
    # What was sent before the growth is still there.
    assert sent[1].tolist() == [0, 1, 2, 3, 4]
    nothing, one = staging.lay_out(0, 1)
    one[:] = 4
    assert [tensor.tolist() for tensor in staging.send().tensors()] == [[], [4]]
    assert nothing.size == 0


def test_one_copy_carries_everything() -> None:
    device = CpuDevice(1)
    parts = [torch.tensor([True, False]), torch.arange(6.0).view(2, 3), torch.tensor([[2**24 - 1]])]
    back = PackedCopy(device, parts).wait()
    assert device.stream.host_copies == 1
    for part, other in zip(parts, (back.harmless, back.prompts, back.samples), strict=True):
        assert other is not None
        assert part.shape == other.shape
        assert torch.equal(part.double(), other.double())


def prompt_chunk(start: int, length: int, prompt_len: int, wanted: int) -> PrefillChunk:
    one = sequence(2, 40, [1], prompt_len=prompt_len, sampling=SamplingOptions(prompt_logprobs=wanted))
    return PrefillChunk(one, start, length, False, False)


def test_prompt_tokens_are_scored_in_slices_of_one_size() -> None:
    chunks = [prompt_chunk(0, 5, 40, 0), prompt_chunk(3, 4, 40, -1), prompt_chunk(16, 9, 20, 3)]
    places: Any = scored_places(chunks, 10)
    assert places[0].tolist() == [0, 1, 2, 3, 4, 20, 21, 22]
    # The tokens that follow; a generated one is not the prompt's.
    assert places[1].tolist() == [201, 202, 203, 204, 205, 217, 218, 219]
    program = Program(DEVICE, 50, Counts.static((1, 2, 4, 8), 50), 4, 30)
    ints: list[Any] = [call.tensors[0] for call in program.scores(places[0][:7], places[1][:7], 1)]
    assert [one.shape for one in ints] == [(3, 4), (3, 4)]
    assert torch.cat([one[0] for one in ints]).tolist() == [0, 1, 2, 3, 4, 20, 21, 0]
    assert torch.cat([one[2] for one in ints]).tolist() == [0, 1, 2, 3, 4, 5, 6, 30]
    exact = Program(DEVICE, 50, Counts.powers((1, 2, 4, 8), 50), 4, 0)
    for alternatives in (True, False):
        calls = exact.scores(places[0], places[1], 1, alternatives=alternatives)
        assert [call.known.get("alternatives", True) for call in calls] == [alternatives] * 2
    assert scored_places(chunks[1:2], 10) is None
    assert slice_rows((1, 2, 4, 8)) == 8
    assert slice_rows(static_counts(256)) == 64
