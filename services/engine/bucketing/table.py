"""The buckets of one phase, ordered for matching."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from operator import attrgetter

from services.engine.bucketing.bucket import Bucket


class BucketTable:
    """Finds, for a forward, the covering bucket with the least work.

    `work` gives a bucket's cost in any unit. It must not fall when a dimension grows: matching stops at the
    first rows and queries whose cost alone is no better than what was found.
    """

    def __init__(self, buckets: Iterable[Bucket], work: Callable[[Bucket], int]) -> None:
        self.buckets = tuple(sorted(set(buckets), key=attrgetter("batch", "query", "context_blocks")))
        if not self.buckets:
            raise ValueError("a phase needs at least one bucket")
        self.max_batch = max(bucket.batch for bucket in self.buckets)
        self.max_query = max(bucket.query for bucket in self.buckets)
        self.max_context_blocks = max(bucket.context_blocks for bucket in self.buckets)
        self._work = work
        # batch -> query -> rising context blocks, keys rising.
        self._contexts: dict[int, dict[int, list[int]]] = {}
        for bucket in self.buckets:
            queries = self._contexts.setdefault(bucket.batch, {})
            queries.setdefault(bucket.query, []).append(bucket.context_blocks)
        self._batches = list(self._contexts)
        self._queries = {batch: list(queries) for batch, queries in self._contexts.items()}

    def match(self, batch: int, query: int, context_blocks: int) -> Bucket | None:
        """The covering bucket with the least work, the smallest of equals; None if no bucket covers."""
        best: Bucket | None = None
        least = 0
        for rows in self._batches[bisect_left(self._batches, batch) :]:
            if best is not None and self._work(Bucket(rows, query, context_blocks)) >= least:
                break
            queries = self._queries[rows]
            for length in queries[bisect_left(queries, query) :]:
                if best is not None and self._work(Bucket(rows, length, context_blocks)) >= least:
                    break
                contexts = self._contexts[rows][length]
                at = bisect_left(contexts, context_blocks)
                if at == len(contexts):
                    continue
                candidate = Bucket(rows, length, contexts[at])
                work = self._work(candidate)
                if best is None or work < least:
                    best, least = candidate, work
        return best
