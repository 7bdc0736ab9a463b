"""The four lanes: their order, their names, and which one a sequence waits in."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

from catenary.v1 import common_pb2

T = TypeVar("T")

# In the order in which they are served. Code works with indexes into this.
CLASSES = (
    common_pb2.PRIORITY_CLASS_SYSTEM,
    common_pb2.PRIORITY_CLASS_INTERACTIVE,
    common_pb2.PRIORITY_CLASS_DEFAULT,
    common_pb2.PRIORITY_CLASS_BULK,
)
LANE_NAMES = ("system", "interactive", "default", "bulk")
LANES = range(len(CLASSES))
SYSTEM, INTERACTIVE, DEFAULT, BULK = LANES


def lane_of(spec: common_pb2.SequenceSpec) -> int:
    """The lane that a valid spec asks for."""
    wanted = spec.priority_class
    return DEFAULT if wanted == common_pb2.PRIORITY_CLASS_UNSPECIFIED else CLASSES.index(wanted)


@dataclass(slots=True, eq=False)
class Ticket(Generic[T]):
    """Something that waits, and what is counted of it. `home`: the lane that it came to, by which it counts;
    promotion changes `lane` alone.

    Times are monotonic seconds: `since` its arrival, `entered` its arrival in `lane`, `deadline` when it is
    refused. `cost`: tokens by which tenants take turns, known once it is the first of its tenant. `apart`: it
    counts in its lane but waits in none, since it needs an engine for itself. `admitted`: an engine has had
    it.
    """

    item: T
    model: str
    home: int
    tenant: str
    tokens: int
    sequences: int
    since: float
    deadline: float
    # In front of its lane, whatever its tenant: it was admitted before.
    first: bool = False
    apart: bool = False
    waits: bool = False
    admitted: bool = False
    lane: int = -1
    entered: float = 0.0
    cost: int | None = None


Row = OrderedDict[Ticket[T], None]
