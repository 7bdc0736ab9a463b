"""The scheduler's load and what it has done so far, for reports."""

from __future__ import annotations

from dataclasses import dataclass

from services.engine.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class SchedulerLoad:
    """Sequences that run and wait, blocks in use, and tokens that prefill has yet to compute.

    The preempted count as waiting, with all their tokens.
    """

    running: int
    waiting: int
    used_blocks: int
    pending_prefill_tokens: int


@dataclass(slots=True)
class StartCounts:
    """Since the start: tokens of prompts that were started, those of them whose KV was there, preemptions."""

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    preemptions: int = 0

    def started(self, sequence: Sequence) -> None:
        """Counts one that has got its blocks, unless it only starts anew."""
        if not sequence.num_preemptions:
            self.prompt_tokens += sequence.prompt_len
            self.cached_prompt_tokens += sequence.num_cached_tokens
