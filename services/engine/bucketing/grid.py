"""From axes to buckets: the product of the axes without the shapes that no batch can have."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

from services.engine.bucketing.bucket import Bucket
from services.engine.bucketing.limits import BucketLimits


def prefill_grid(
    batches: Iterable[int], queries: Iterable[int], contexts: Iterable[int], limits: BucketLimits
) -> list[Bucket]:
    """Prefill buckets within the token budget and the model's length, sorted."""
    longest, budget = limits.max_context_blocks, limits.max_num_batched_tokens
    kept = [context for context in contexts if context <= longest]
    shapes = [
        (batch, query)
        for batch, query in product(batches, queries)
        if query <= limits.max_model_len and batch * query <= budget
    ]
    return [Bucket(batch, query, context) for batch, query in sorted(shapes) for context in sorted(kept)]


def decode_grid(batches: Iterable[int], blocks: Iterable[int], limits: BucketLimits) -> list[Bucket]:
    """Decode buckets, sorted.

    Unless the fetch is contiguous, each row has at least one block, and at most those of the longest
    sequence.
    """
    if limits.contiguous:
        return sorted(Bucket(batch, 1, total) for batch, total in product(batches, blocks))
    longest = limits.blocks_per_sequence
    return sorted(
        {
            Bucket(batch, 1, min(total, batch * longest))
            for batch, total in product(batches, blocks)
            if batch <= total
        }
    )
