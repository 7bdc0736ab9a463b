"""Padding that was actually computed. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from services.engine.bucketing import Bucket
from services.engine.graphs.phase import Phase


@dataclass(slots=True)
class PhaseWork:
    """Of one forward of a phase, or of all. Tokens of a decode are rows; blocks are those of the context."""

    tokens: int = 0
    padding_tokens: int = 0
    blocks: int = 0
    padding_blocks: int = 0

    def add(self, other: PhaseWork) -> None:
        """Adds another's work to this."""
        self.tokens += other.tokens
        self.padding_tokens += other.padding_tokens
        self.blocks += other.blocks
        self.padding_blocks += other.padding_blocks


class PaddingCounter:
    """Compares what forwards had to compute with the buckets that they ran in."""

    def __init__(self) -> None:
        self.prefill = PhaseWork()
        self.decode = PhaseWork()

    def add(self, phase: Phase, bucket: Bucket, *, tokens: int, blocks: int) -> PhaseWork:
        """One forward: `tokens` real tokens and `blocks` real context blocks, all rows together.

        Returns its work alone.
        """
        prefill = phase is Phase.PREFILL
        work = PhaseWork(
            tokens=tokens,
            padding_tokens=bucket.batch * bucket.query - tokens,
            blocks=blocks,
            padding_blocks=bucket.context_blocks * (bucket.batch if prefill else 1) - blocks,
        )
        (self.prefill if prefill else self.decode).add(work)
        return work
