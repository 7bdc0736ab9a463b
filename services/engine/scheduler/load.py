"""The scheduler's load, for reports."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerLoad:
    """Sequences that run and wait, blocks in use, and tokens that prefill has yet to compute.

    The preempted count as waiting, with all their tokens.
    """

    running: int
    waiting: int
    used_blocks: int
    pending_prefill_tokens: int
