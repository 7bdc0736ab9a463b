"""The static shape of one forward."""

from __future__ import annotations

from dataclasses import dataclass


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
        """Tokens that a prefill of this shape touches, context and padding included."""
        return self.batch * (self.query + self.context_blocks * block_size)
