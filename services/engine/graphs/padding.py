"""Padding that was actually computed. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from services.engine.bucketing import Bucket
from services.engine.graphs.phase import Phase


@dataclass(slots=True)
class PhaseWork:
    """Sums over all forwards of a phase. Tokens of a decode are rows; blocks are those of the context."""

    tokens: int = 0
    padding_tokens: int = 0
    blocks: int = 0
    padding_blocks: int = 0


class PaddingCounter:
    """Compares what forwards had to compute with the buckets that they ran in."""

    def __init__(self) -> None:
        self.prefill = PhaseWork()
        self.decode = PhaseWork()

    def add(self, phase: Phase, bucket: Bucket, *, tokens: int, blocks: int) -> None:
        """One forward: `tokens` real tokens and `blocks` real context blocks, all rows together."""
        prefill = phase is Phase.PREFILL
        work = self.prefill if prefill else self.decode
        work.tokens += tokens
        work.padding_tokens += bucket.batch * bucket.query - tokens
        work.blocks += blocks
        work.padding_blocks += bucket.context_blocks * (bucket.batch if prefill else 1) - blocks
