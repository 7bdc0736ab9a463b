"""The prefill forward of a step, filled under the limits of its buckets."""

from __future__ import annotations

from services.engine.bucketing import Bucket, BucketPlan
from services.engine.scheduler.plan import PrefillChunk
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

    def add(self, sequence: Sequence, start: int) -> PrefillChunk | None:
        """Adds as much as fits of a sequence whose first `start` tokens are computed.

        Returns None, adding nothing, if the batch is full or no bucket covers it with that.
        """
        if self.full:
            return None
        length = self._length(sequence, start)
        query = max(self._query, length)
        context = max(self._context, -(-start // self._buckets.block_size))
        bucket = self._buckets.prefill_bucket(len(self.chunks) + 1, query, context)
        if bucket is None:
            return None
        end = start + length
        samples = end == len(sequence.token_ids)
        chunk = PrefillChunk(sequence, start, length, samples, samples and sequence.masks_stops(end))
        self.chunks.append(chunk)
        self.bucket, self._query, self._context = bucket, query, context
        self._budget -= length
        return chunk

    def _length(self, sequence: Sequence, start: int) -> int:
        total = len(sequence.token_ids)
        end = start + min(total - start, self._budget, self._buckets.max_prefill_query)
        # A chunk that is not the last ends with a full block if it can: the next has no partial context.
        aligned = end - end % self._buckets.block_size
        return (aligned if end < total and aligned > start else end) - start
