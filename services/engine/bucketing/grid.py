"""From axes to buckets, and what a list of buckets lacks to cover every step of an engine."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

from services.engine.bucketing.bucket import LONG_CONTEXT, Bucket, BucketLimits


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
    """Return the contexts below the edge, and the edge in place of those beyond it."""
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


def split_by_limits(
    buckets: Iterable[Bucket], limits: BucketLimits
) -> tuple[list[Bucket], list[Bucket], list[Bucket]]:
    """Sort listed buckets into prefill, decode (query 1) and those that no step within the limits fills.

    A decode bucket with more blocks than its rows can have is kept with as many as they can have.
    """
    prefill: list[Bucket] = []
    decode: list[Bucket] = []
    omitted: list[Bucket] = []
    for bucket in buckets:
        if bucket.query > 1:
            (prefill if _fits_prefill(bucket, limits) else omitted).append(bucket)
        elif _fits_decode(bucket, limits):
            blocks = bucket.context_blocks
            if not limits.contiguous:
                blocks = min(blocks, bucket.batch * limits.blocks_per_sequence)
            decode.append(Bucket(bucket.batch, 1, blocks))
        else:
            omitted.append(bucket)
    return prefill, decode, omitted


def missing_prefill(buckets: Iterable[Bucket], limits: BucketLimits) -> list[Bucket]:
    """Return the last bucket that the prefill of single sequences needs in addition to these: one or none.

    Every chunk of q tokens with up to `context_before(q)` blocks before it has to be covered. Between two
    bucket lengths the shortest chunk is the one with the most context, so these are looked at alone.
    """
    known = list(buckets)
    depths: dict[int, int] = {}
    for bucket in known:
        depths[bucket.query] = max(depths.get(bucket.query, 0), bucket.context_blocks)
    shortest = sorted({1, *(query + 1 for query in depths if query < limits.max_query)})
    for query in shortest:
        context = limits.context_before(query)
        if max((depth for length, depth in depths.items() if length >= query), default=-1) < context:
            return [Bucket(1, limits.max_query, context)]
    if max(depths, default=0) < limits.max_query:
        return [Bucket(1, limits.max_query, limits.context_before(limits.max_query))]
    return []


def missing_decode(buckets: Iterable[Bucket], limits: BucketLimits) -> list[Bucket]:
    """Return the last bucket that decode batches need beside these: one or none.

    The scheduler splits a batch at the most rows and at the most blocks of all buckets, so one bucket has to
    hold both at once.
    """
    known = list(buckets)
    blocks = max([limits.max_distinct_decode_blocks, *(bucket.context_blocks for bucket in known)])
    rows = limits.max_num_seqs if limits.contiguous else min(limits.max_num_seqs, blocks)
    if any(bucket.covers(rows, 1, blocks) for bucket in known):
        return []
    return [Bucket(rows, 1, blocks)]


def _fits_prefill(bucket: Bucket, limits: BucketLimits) -> bool:
    return (
        bucket.batch <= limits.max_prefill_seqs
        and bucket.query <= limits.max_model_len
        and bucket.batch * bucket.query <= limits.padded_tokens
        and bucket.context_blocks <= limits.max_context_blocks
    )


def _fits_decode(bucket: Bucket, limits: BucketLimits) -> bool:
    if bucket.batch > limits.max_num_seqs:
        return False
    if limits.contiguous:
        return 1 <= bucket.context_blocks <= limits.num_blocks
    return bucket.batch <= bucket.context_blocks
