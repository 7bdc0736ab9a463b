"""The limits of an engine, from which all buckets follow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# From this model length on, context before a full chunk is what prefill buckets are spent on.
LONG_CONTEXT: Final = 8192


@dataclass(frozen=True, slots=True)
class BucketLimits:
    """What a forward can hold at the most.

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
