"""Load shedding by the gateways: classes, and tenants in them, that have no room to wait."""

from __future__ import annotations

from collections.abc import Iterable

from catenary.v1 import common_pb2, router_pb2
from services.router.admission.lane import CLASSES, LANES, T
from services.router.admission.queue import ModelQueue

# Of the message to the gateways, which has one entry for each model and class that is full.
MAX_ENTRIES = 64
# Once full, a queue counts as full until so much of it is left: a full one would else change at each step.
_STILL_FULL = 0.9

Key = tuple[str, int, str | None]


class Shedding:
    """The entries, and when they have to be told again: each holds only for its retry time."""

    def __init__(self) -> None:
        self._until: dict[Key, float] = {}

    def update(self, queues: Iterable[ModelQueue[T]], now: float) -> router_pb2.ShedState | None:
        """The message to send now. None: the last one still holds."""
        full: dict[Key, int] = {}
        for queue in queues:
            for key in self._full(queue):
                if len(full) < MAX_ENTRIES:
                    full[key] = queue.retry_after_ms(key[1], now)
        # What holds is told again before it has expired.
        lapses = any(until - now < full[key] / 2000 for key, until in self._until.items() if key in full)
        if full.keys() == self._until.keys() and not lapses:
            return None
        self._until = {key: now + after / 1000 for key, after in full.items()}
        return state(full)

    def _full(self, queue: ModelQueue[T]) -> Iterable[Key]:
        if not len(queue.lanes):
            return
        for lane in LANES:
            key: Key = (queue.model, lane, None)
            if queue.held[lane].sequences and queue.fullness(lane) >= self._mark(key):
                yield key
        for lane, tenant in queue.waiting_tenants():
            key = (queue.model, lane, tenant)
            if queue.fullness(lane, tenant) >= self._mark(key):
                yield key

    def _mark(self, key: Key) -> float:
        return _STILL_FULL if key in self._until else 1.0


def state(full: dict[Key, int]) -> router_pb2.ShedState:
    """The message: retry times in milliseconds by key."""
    return router_pb2.ShedState(
        entries=[
            router_pb2.ShedEntry(
                model=model,
                priority_class=CLASSES[lane],
                tenant=tenant,
                code=common_pb2.ERROR_CODE_OVERLOADED,
                retry_after_ms=after,
            )
            for (model, lane, tenant), after in full.items()
        ]
    )
