"""Tasks that wait for a worker: tenants take turns, and long tasks never take the last worker."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from typing import Generic, TypeVar

W = TypeVar("W")


class Waiting(Generic[W]):
    """A task that waits. `size`: bytes of its texts. `long`: it may hold a worker for long. `what`: the
    owner's, to tell it of its turn."""

    __slots__ = ("long", "size", "tenant", "what")

    def __init__(self, tenant: str, size: int, what: W, *, long: bool) -> None:
        self.tenant = tenant
        self.size = size
        self.long = long
        self.what = what


class Turns(Generic[W]):
    """Two lanes, one of long tasks. In each, tenants take turns, and a tenant's tasks keep their order.

    `most` tasks wait, of `most_bytes` together. Where there are more, the tenant that has most of them loses
    its last one: whoever fills the queue leaves room for others.
    """

    def __init__(self, *, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._lanes: dict[bool, OrderedDict[str, deque[Waiting[W]]]] = {
            False: OrderedDict(),
            True: OrderedDict(),
        }
        self._tasks: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._last_long = False

    def __len__(self) -> int:
        return self._tasks.total()

    def add(self, waiting: Waiting[W]) -> None:
        """Let a task wait behind those of its tenant."""
        self._lanes[waiting.long].setdefault(waiting.tenant, deque()).append(waiting)
        self._tasks[waiting.tenant] += 1
        self._bytes[waiting.tenant] += waiting.size

    def next(self, *, long: bool) -> Waiting[W] | None:
        """Take the task whose turn it is; without `long` none of those. Lanes alternate where both wait."""
        order = (False, True) if self._last_long else (True, False)
        for lane in order:
            if self._lanes[lane] and (long or not lane):
                tenant, row = next(iter(self._lanes[lane].items()))
                self._lanes[lane].move_to_end(tenant)
                waiting = row[0]
                self.remove(waiting)
                self._last_long = lane
                return waiting
        return None

    def remove(self, waiting: Waiting[W]) -> None:
        """A task waits no longer."""
        lane = self._lanes[waiting.long]
        row = lane[waiting.tenant]
        row.remove(waiting)
        if not row:
            del lane[waiting.tenant]
        self._tasks[waiting.tenant] -= 1
        self._bytes[waiting.tenant] -= waiting.size
        if not self._tasks[waiting.tenant]:
            del self._tasks[waiting.tenant], self._bytes[waiting.tenant]

    def surplus(self, newest: Waiting[W]) -> Waiting[W] | None:
        """Take the task that has to go, now that `newest` has come; None: there is room for all."""
        if len(self) > self._most:
            held = self._tasks
        elif self._bytes.total() > self._most_bytes:
            held = self._bytes
        else:
            return None
        most = max(held.values())
        tenant = newest.tenant if held[newest.tenant] == most else max(held, key=lambda name: held[name])
        lanes = [self._lanes[lane][tenant] for lane in (True, False) if tenant in self._lanes[lane]]
        waiting = newest if tenant == newest.tenant else lanes[0][-1]
        self.remove(waiting)
        return waiting
