"""From axes to buckets: the product of the axes without the shapes that no batch can have."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

from services.engine.bucketing.bucket import Bucket
from services.engine.bucketing.limits import LONG_CONTEXT, BucketLimits


def prefill_grid(
    batches: Iterable[int], queries: Iterable[int], contexts: Iterable[int], limits: BucketLimits
) -> list[Bucket]:
    """Prefill buckets within the token budget and the model's length, sorted.

    Of a long model, whose largest context is far from what a large query can have before it, each query's
    largest context is the most that a chunk of this bucket can have.
    """
    longest, budget = limits.max_context_blocks, limits.padded_tokens
    kept = sorted(context for context in contexts if context <= longest)
    lengths = sorted(query for query in queries if query <= limits.max_model_len)
    reach = {
        query: limits.context_before(shorter + 1)
        for shorter, query in zip([0, *lengths], lengths, strict=False)
    }
    return [
        Bucket(batch, query, context)
        for batch in sorted(batches)
        for query in lengths
        if batch * query <= budget
        for context in (_up_to_edge(kept, reach[query]) if limits.max_model_len >= LONG_CONTEXT else kept)
    ]


def _up_to_edge(contexts: list[int], edge: int) -> list[int]:
    """The contexts below the edge, and the edge in place of those beyond it."""
    below = [context for context in contexts if context < edge]
    return [*below, edge] if len(below) < len(contexts) else below


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
