"""The static shape of one forward, the limits from which all shapes follow, and inputs that fill one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """Rows, tokens per row and KV blocks of context.

    Prefill: `context_blocks` is the largest number of already computed blocks of one row. Decode: `query` is
    1 and `context_blocks` is the sum over all rows, the blocks of the new tokens included.
    """

    batch: int
    query: int
    context_blocks: int

    def covers(self, batch: int, query: int, context_blocks: int) -> bool:
        """True if a forward of this size fits."""
        return self.batch >= batch and self.query >= query and self.context_blocks >= context_blocks

    def prefill_tokens(self, block_size: int) -> int:
        """Return tokens that a prefill of this shape touches, context and padding included."""
        return self.batch * (self.query + self.context_blocks * block_size)


# From this model length on, context before a full chunk is what prefill buckets are spent on.
LONG_CONTEXT: Final = 8192


@dataclass(frozen=True, slots=True)
class BucketLimits:
    """Limits of a forward.

    `max_num_batched_tokens` bounds the tokens of a prefill forward, padding included; `num_blocks` is the
    size of the KV pool. `contiguous`: decode fetches the pool's first blocks up to the highest one in use,
    instead of gathering the sequences' own. `clamp_decode_blocks`: sequences that share blocks are not
    expected to exceed a few times the pool; a hybrid model, whose blocks are not all of the pool, unsets it.
    `max_chunk`: tokens of the longest prefill chunk, None if a step's tokens and the model's length alone
    bound it. `max_padded_tokens`: of a prefill forward, padding included, where padding costs so little that
    it may be more than `max_num_batched_tokens` (None), which bounds a chunk all the same.
    """

    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int
    max_prefill_seqs: int = 1
    contiguous: bool = False
    clamp_decode_blocks: bool = True
    max_chunk: int | None = None
    max_padded_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in (
            "block_size",
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "num_blocks",
            "max_prefill_seqs",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.max_chunk is not None and self.max_chunk < 1:
            raise ValueError(f"max_chunk must be at least 1, not {self.max_chunk}")
        if self.padded_tokens < self.max_num_batched_tokens:
            raise ValueError(
                f"max_padded_tokens ({self.max_padded_tokens}) must be at least max_num_batched_tokens "
                f"({self.max_num_batched_tokens})"
            )

    @property
    def blocks_per_sequence(self) -> int:
        """Blocks of a sequence of maximum length."""
        return -(-self.max_model_len // self.block_size)

    @property
    def padded_tokens(self) -> int:
        """Most tokens of a prefill forward, padding included."""
        return self.max_num_batched_tokens if self.max_padded_tokens is None else self.max_padded_tokens

    @property
    def max_query(self) -> int:
        """Longest prefill chunk."""
        longest = min(self.max_num_batched_tokens, self.max_model_len)
        return longest if self.max_chunk is None else min(longest, self.max_chunk)

    @property
    def max_context_blocks(self) -> int:
        """Blocks before the last token of the longest sequence whose logits are ever needed."""
        return -(-(self.max_model_len - 1) // self.block_size)

    def context_before(self, query: int) -> int:
        """Most context blocks of a prefill chunk of `query` tokens, the last chunk of the longest prompt."""
        return max(0, -(-(self.max_model_len - 1 - query) // self.block_size))

    @property
    def max_distinct_decode_blocks(self) -> int:
        """Largest sum of blocks over a decode batch whose sequences share none."""
        return min(self.num_blocks, self.max_num_seqs * self.blocks_per_sequence)


def dummy_decode_lengths(bucket: Bucket, limits: BucketLimits) -> list[int]:
    """Return tokens before the new one of each row, so that the rows' blocks add up to the bucket's.

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
