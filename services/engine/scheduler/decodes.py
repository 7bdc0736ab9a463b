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
    """Who decodes, and those of them that need one more block. `split`: others have to wait."""

    sequences: list[Sequence]
    growing: list[Sequence]
    split: bool


def choose_decodes(running: RunningSet, buckets: BucketPlan, *, contiguous: bool) -> DecodeChoice:
    """Everybody if the largest bucket holds that, else those who were served longest ago.

    Whoever is left out comes first next time, so a batch that exceeds the buckets is split over steps. The
    sum of blocks can exceed them even if all fit the pool: a shared one counts for each that shares it. In a
    contiguous cache the sum does not matter.
    """
    blocks = running.decode_blocks + len(running.growing)
    max_blocks = buckets.max_decode_blocks if not contiguous else sys.maxsize
    if len(running.decoding) <= buckets.max_decode_batch and blocks <= max_blocks:
        return DecodeChoice(list(running.decoding.values()), list(running.growing.values()), split=False)
    chosen: list[Sequence] = []
    total = 0
    for sequence in sorted(running.decoding.values(), key=attrgetter("last_decode_step")):
        if len(chosen) == buckets.max_decode_batch:
            break
        more = sequence.key in running.growing and not sequence.shares_last
        blocks = len(sequence.block_table) + more
        if total + blocks <= max_blocks:
            chosen.append(sequence)
            total += blocks
    growing = [sequence for sequence in chosen if sequence.key in running.growing]
    return DecodeChoice(chosen, growing, split=True)


def book_decodes(
    sequences: Iterable[Sequence], running: RunningSet, block_size: int
) -> tuple[DecodeRow, ...]:
    """The rows that feed each sequence's last token. Books their computation and the tokens to come."""
    rows: list[DecodeRow] = []
    for sequence in sequences:
        position = sequence.num_computed_tokens
        token = None if sequence.num_pending else sequence.token_ids[position]
        following = position + 1
        rows.append(DecodeRow(sequence, position, following < sequence.shortest, token))
        sequence.num_computed_tokens = following
        sequence.num_pending += 1
        if sequence.group is not None:
            running.rest(sequence)
        elif following + 1 >= sequence.longest:
            running.end(sequence)
        elif not following % block_size:
            running.growing[sequence.key] = sequence
    return tuple(rows)
