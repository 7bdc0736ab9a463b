"""The two batches of a step, filled under the limits of their buckets."""

from __future__ import annotations

from collections.abc import Iterable

from services.engine.bucketing import Bucket, BucketPlan
from services.engine.kv import BlockPool
from services.engine.scheduler.plan import DecodeRow, PrefillChunk
from services.engine.scheduler.sequence import Sequence


class PrefillBatch:
    """Chunks of a step's prefill forward: at most `max_seqs` rows and `budget` tokens."""

    def __init__(self, buckets: BucketPlan, budget: int, max_seqs: int) -> None:
        self._buckets = buckets
        self._budget = budget
        self._max_seqs = min(max_seqs, buckets.max_prefill_batch)
        self._query = 0
        self._context = 0
        self.chunks: list[PrefillChunk] = []
        self.bucket: Bucket | None = None

    @property
    def full(self) -> bool:
        """True if no further chunk can enter."""
        return self._budget < 1 or len(self.chunks) >= self._max_seqs

    def add(self, sequence: Sequence) -> bool:
        """Adds as much of the sequence's rest as fits. False, adding nothing, if no bucket covers that."""
        if self.full:
            return False
        start = sequence.num_computed_tokens
        length = self._length(sequence, start)
        query = max(self._query, length)
        context = max(self._context, -(-start // self._buckets.block_size))
        bucket = self._buckets.prefill_bucket(len(self.chunks) + 1, query, context)
        if bucket is None:
            return False
        samples = start + length == len(sequence.token_ids)
        self.chunks.append(PrefillChunk(sequence, start, length, samples, samples and sequence.masks_stops))
        self.bucket, self._query, self._context = bucket, query, context
        self._budget -= length
        return True

    def _length(self, sequence: Sequence, start: int) -> int:
        length = min(sequence.num_uncomputed_tokens, self._budget, self._buckets.max_prefill_query)
        end = start + length
        # A chunk that is not the last ends with a full block if it can: the next has no partial context.
        aligned = end - end % self._buckets.block_size
        if end < len(sequence.token_ids) and aligned > start:
            return aligned - start
        return length


def pick_decodes(candidates: Iterable[Sequence], buckets: BucketPlan, pool: BlockPool) -> list[Sequence]:
    """The sequences that decode in this step, by age: those served longest ago, as far as the buckets reach.

    Whoever is left out comes first next time, so a batch that exceeds the buckets is split over steps.
    """
    picked: list[Sequence] = []
    total = 0
    for sequence in sorted(candidates, key=lambda sequence: sequence.last_decode_step):
        if len(picked) == buckets.max_decode_batch:
            break
        blocks = pool.blocks_for(len(sequence.token_ids))
        if total + blocks <= buckets.max_decode_blocks:
            picked.append(sequence)
            total += blocks
    picked.sort(key=lambda sequence: sequence.arrival)
    return picked


def decode_rows(sequences: Iterable[Sequence]) -> tuple[DecodeRow, ...]:
    """The rows that feed each sequence's last token."""
    return tuple(
        DecodeRow(sequence, sequence.num_computed_tokens, sequence.masks_stops) for sequence in sequences
    )
