"""How often and how long a sequence is tried again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ResumePolicy:
    """Bounds of failover, for every sequence alike.

    max_attempts: lives in a row that may end without a token; max_lives: lives of a sequence in all;
    wait_s: seconds in which nobody may take it before it is given up, counted from the failure;
    first_delay_s, longest_delay_s: pauses before it is submitted again double between these, each shortened
    by up to half at random.
    """

    max_attempts: int = 8
    max_lives: int = 64
    wait_s: float = 15.0
    first_delay_s: float = 0.02
    longest_delay_s: float = 2.0
