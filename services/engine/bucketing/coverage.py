"""What a list of buckets needs so that every step of an engine has one of them."""

from __future__ import annotations

from collections.abc import Iterable

from services.engine.bucketing.bucket import Bucket
from services.engine.bucketing.limits import BucketLimits


def split_by_limits(
    buckets: Iterable[Bucket], limits: BucketLimits
) -> tuple[list[Bucket], list[Bucket], list[Bucket]]:
    """Sorts listed buckets into prefill, decode (query 1) and those that no step within the limits fills.

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
    """The last bucket that the prefill of single sequences needs beside these: one or none.

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
    """The last bucket that decode batches need beside these: one or none.

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
