"""Parts of choices as a request yields them, and whole choices."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.streaming.sequence_text import LogprobEntry


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """New text of a choice and, with its last part, why it ended ("stop" or "length")."""

    index: int
    text: str
    entries: tuple[LogprobEntry, ...] = ()
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class ChoiceResult:
    """A finished choice. `entries` is None if log probabilities were not asked for."""

    index: int
    text: str
    entries: tuple[LogprobEntry, ...] | None
    finish_reason: str
