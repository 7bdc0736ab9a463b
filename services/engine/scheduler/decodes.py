"""The decode forward of a step: who decodes under the limits of the buckets, and the rows."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter

from services.engine.bucketing import BucketPlan
from services.engine.scheduler.plan import DecodeRow
from services.engine.scheduler.running import RunningSet
from services.engine.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class DecodeChoice:
    """Who decodes, and those of them that need one more block."""

    sequences: list[Sequence]
    growing: list[Sequence]


def choose_decodes(decoding: Iterable[Sequence], buckets: BucketPlan, *, contiguous: bool) -> DecodeChoice:
    """Everybody if the largest bucket holds that, else those who were served longest ago.

    Whoever is left out comes first next time, so a batch that exceeds the buckets is split over steps. The
    sum of blocks can exceed them even if all fit the pool: a shared one counts for each that shares it. In a
    contiguous cache the sum does not matter.
    """
    size, growing, blocks = buckets.block_size, [], 0
    max_blocks = buckets.max_decode_blocks if not contiguous else sys.maxsize
    everybody = list(decoding)
    for sequence in everybody:
        held = len(sequence.block_table)
        if sequence.num_computed_tokens == held * size:
            growing.append(sequence)
            held += 1
        blocks += held
    if len(everybody) <= buckets.max_decode_batch and blocks <= max_blocks:
        return DecodeChoice(everybody, growing)
    return _split(everybody, buckets, max_blocks)


def _split(everybody: list[Sequence], buckets: BucketPlan, max_blocks: int) -> DecodeChoice:
    chosen: list[Sequence] = []
    growing: list[Sequence] = []
    total = 0
    for sequence in sorted(everybody, key=attrgetter("last_decode_step")):
        if len(chosen) == buckets.max_decode_batch:
            break
        blocks = sequence.num_computed_tokens // buckets.block_size + 1
        if total + blocks <= max_blocks:
            chosen.append(sequence)
            total += blocks
            if blocks > len(sequence.block_table):
                growing.append(sequence)
    return DecodeChoice(chosen, growing)


def book_decodes(sequences: Iterable[Sequence], running: RunningSet, step: int) -> tuple[DecodeRow, ...]:
    """The rows that feed each sequence's last token. Books their computation and the tokens to come."""
    rows: list[DecodeRow] = []
    for sequence in sequences:
        position = sequence.num_computed_tokens
        following = position + 1
        token = None if sequence.num_pending else sequence.token_ids[position]
        rows.append(DecodeRow(sequence, position, sequence.masks_stops(following), token))
        sequence.num_computed_tokens = following
        sequence.num_pending += 1
        sequence.last_decode_step = step
        if following + 1 >= sequence.longest:
            running.ending[sequence.key] = running.decoding.pop(sequence.key)
    return tuple(rows)
