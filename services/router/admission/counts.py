"""Counts of each class since the router's start."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from services.router.admission.lane import LANES


class RefusedFor(StrEnum):
    """Why a sequence that could have been served was not let in. A closed set: it labels a metric."""

    QUEUE_FULL = "queue_full"
    ROUTER_FULL = "router_full"
    WAITED_TOO_LONG = "waited_too_long"
    NOT_SERVED = "not_served"
    DRAINING = "draining"


@dataclass(slots=True)
class LaneCounts:
    """Sequences of one class. `admitted`: given to an engine for the first time."""

    admitted: int = 0
    promoted: int = 0
    refused: dict[RefusedFor, int] = field(default_factory=lambda: dict.fromkeys(RefusedFor, 0))


@dataclass(frozen=True, slots=True)
class LaneView:
    """A lane over all models, as it is now. `oldest_wait_s`: of those that are next in their tenants'
    rows."""

    counts: LaneCounts
    queued_sequences: int
    queued_tokens: int
    tenants: int
    oldest_wait_s: float
    live_sequences: int


def lane_counts() -> list[LaneCounts]:
    """Zeros for every class."""
    return [LaneCounts() for _ in LANES]
