"""Inputs that fill a bucket: what a warm-up or a test runs to reach exactly this shape."""

from __future__ import annotations

from services.engine.bucketing.bucket import Bucket
from services.engine.bucketing.limits import BucketLimits


def dummy_decode_lengths(bucket: Bucket, limits: BucketLimits) -> list[int]:
    """Tokens before the new one of each row, so that the rows' blocks add up to the bucket's.

    A row with n tokens before its new one has n // block_size + 1 blocks. The blocks are spread evenly. A
    contiguous fetch counts up to the highest block id and not the rows' blocks: if the rows cannot hold that
    many, give the last block the id context_blocks - 1. Raises ValueError for a bucket that no decode batch
    can fill.
    """
    longest = limits.blocks_per_sequence
    total = min(bucket.context_blocks, bucket.batch * longest) if limits.contiguous else bucket.context_blocks
    if not bucket.batch <= total <= bucket.batch * longest:
        raise ValueError(
            f"{bucket.batch} rows of 1 to {longest} blocks do not have {bucket.context_blocks} together"
        )
    each, more = divmod(total, bucket.batch)
    blocks = [each + (row < more) for row in range(bucket.batch)]
    return [min(count * limits.block_size, limits.max_model_len) - 1 for count in blocks]


def dummy_prefill_chunks(bucket: Bucket, limits: BucketLimits) -> list[tuple[int, int]]:
    """Start and length of each row's chunk, so that the longest and the deepest are the bucket's.

    Where the model's length leaves no room for both in one row, the first row has the length and the others
    the depth. Raises ValueError if there is no other row: such a bucket is made by a rule and filled by no
    step.
    """
    query, context = bucket.query, bucket.context_blocks
    start = min(context * limits.block_size, limits.max_model_len - query)
    if start >= 0 and -(-start // limits.block_size) == context:
        return [(start, query)] * bucket.batch
    deep = min(context * limits.block_size, limits.max_model_len - 1)
    if bucket.batch == 1 or -(-deep // limits.block_size) != context or query > limits.max_model_len:
        raise ValueError(
            f"no chunk of {query} tokens has {context} blocks before it in {limits.max_model_len} tokens"
        )
    return [(0, query), *[(deep, 1)] * (bucket.batch - 1)]
