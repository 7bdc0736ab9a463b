"""Attached routers: the outbox of each, and their turns at an engine that is reserved for one of them."""

from __future__ import annotations

import asyncio
import math
from typing import Final

from catenary.outbox import Messages, Outbox, Steps
from catenary.telemetry import get_logger
from catenary.v1 import common_pb2, engine_pb2

log = get_logger(__name__)


# In place of a load report that is due: the report is made when the stream takes it.
LOAD_DUE: Final = engine_pb2.AttachRequest(load=engine_pb2.LoadReport())


class RouterOutbox(Outbox[engine_pb2.AttachRequest]):
    """Outbox of one attachment, which `link` names and which is never used twice: steps, then answers, then a
    load report.

    Rows are added to `steps` as they come and sent from the end of their step on (`flush`). Unsent answers
    are bounded: while there are `max_answers` of them, the router's commands are not read.
    """

    def __init__(self, link: int, *, max_answers: int) -> None:
        self.link = link
        self.steps = Steps(lambda step: engine_pb2.AttachRequest(step=step))
        self._answers = Messages[engine_pb2.AttachRequest]()
        self._load = Messages[engine_pb2.AttachRequest]()
        super().__init__(self.steps, self._answers, self._load, limit=max_answers)
        self._first_went = False
        self.closing = ""
        """Why the stream ends, once it is to."""

    @property
    def unread(self) -> int:
        """Answers that wait. Rows are bounded by live sequences."""
        return len(self._answers)

    def flush(self) -> None:
        """Let the rows of a complete step go."""
        if self.steps:
            self.wake()

    def refuse(self, handle: int, error: common_pb2.Error) -> None:
        """Answer a submit with a refusal."""
        refusal = common_pb2.Refusal(handle=handle, error=error)
        self.put(self._answers, engine_pb2.AttachRequest(refusal=refusal))

    def abort_result(self, handle: int, outcome: common_pb2.AbortOutcome.ValueType) -> None:
        """Answer an abort."""
        result = engine_pb2.AbortResult(handle=handle, outcome=outcome)
        self.put(self._answers, engine_pb2.AttachRequest(abort_result=result))

    def request_load(self) -> None:
        """Send a load report as soon as the stream takes it."""
        self.put(self._load, LOAD_DUE, "load")

    def leave(self, reason: str) -> None:
        """Send what waits, then end the stream. The first reason counts."""
        self.closing = self.closing or reason
        self.close(flush=True)

    def take(self) -> list[engine_pb2.AttachRequest]:
        """Return all messages that wait, LOAD_DUE for a load report.

        First rows of sequences are returned alone, before the rest is put together, but not twice in a row:
        the rest is not held up by the first rows of ever more sequences.
        """
        if self.steps.has_first and not self._first_went:
            self._first_went = True
            return [self.steps.pop()]
        self._first_went = False
        return super().take()


class AttachedRouters:
    """Outboxes by link, and the router for which the engine is reserved.

    Routers take turns in the order in which they asked. During the turn of one the engine refuses sequences
    of the others, so it empties, however many routers there are. `kept_limit_s` bounds a turn, so that a
    router which forgets to give the engine back does not close it to the others for ever.
    """

    def __init__(self, *, kept_limit_s: float = math.inf) -> None:
        self._kept_limit_s = kept_limit_s
        self._ports: dict[int, RouterOutbox] = {}
        # Instance ids, for logs.
        self._names: dict[int, str] = {}
        # In the order of their turns.
        self.turns: dict[int, None] = {}
        # When this turn was first looked at, in steady seconds.
        self._turn_since: float | None = None
        self._all_left = asyncio.Event()
        self._all_left.set()
        # Links whose routers know that the engine takes nothing new.
        self._aware: set[int] = set()
        self._left_or_aware = asyncio.Event()

    def __len__(self) -> int:
        return len(self._ports)

    def port(self, link: int | None) -> RouterOutbox | None:
        """Return the outbox of a link, None if its router is gone."""
        return None if link is None else self._ports.get(link)

    def join(self, port: RouterOutbox, router: str) -> None:
        """Add a router that granted a lease; `router` is its instance id."""
        self._ports[port.link] = port
        self._names[port.link] = router
        self._all_left.clear()

    def leave(self, port: RouterOutbox) -> bool:
        """Remove a router. Return False if it was not attached."""
        if self._ports.pop(port.link, None) is None:
            return False
        del self._names[port.link]
        self._aware.discard(port.link)
        self._left_or_aware.set()
        if not self._ports:
            self._all_left.set()
        self._set_turn(port.link, wanted=False)
        return True

    async def all_left(self) -> None:
        """Wait until no router is attached."""
        await self._all_left.wait()

    def reserve(self, port: RouterOutbox, *, wanted: bool) -> None:
        """Reserve the engine for a router from its next turn on, or end that. Idempotent."""
        if port.link in self._ports:
            self._set_turn(port.link, wanted=wanted)

    def reserved_from(self, link: int) -> bool:
        """Whether the engine refuses sequences of this router: it is the turn of another one."""
        return next(iter(self.turns), link) != link

    def end_long_turn(self, now: float) -> None:
        """End a turn that lasts too long at the steady time `now`, in seconds, if there are other routers.

        The router whose turn ended comes last of those that wait; if none waits, it has to ask anew.
        """
        link = next(iter(self.turns), None)
        if link is None:
            return
        if self._turn_since is None:
            self._turn_since = now
        if now - self._turn_since < self._kept_limit_s or len(self._ports) < 2:
            return
        waiting = len(self.turns) - 1
        log.warning(
            "a router kept the engine from the others for too long: its turn is over",
            router=self._names[link],
            kept_limit_s=self._kept_limit_s,
            waiting=waiting,
        )
        self._set_turn(link, wanted=False)
        if waiting:
            self._set_turn(link, wanted=True)

    def knows_of_drain(self, port: RouterOutbox) -> None:
        """Note that a router has answered a report that says DRAINING: it sends no further sequences."""
        self._aware.add(port.link)
        self._left_or_aware.set()

    async def all_know_of_drain(self) -> None:
        """Wait until each router that is here has. A sequence that comes when the stream has ended is lost
        instead of refused, and counts as a death."""
        while self._ports.keys() - self._aware:
            self._left_or_aware.clear()
            await self._left_or_aware.wait()

    def flush(self) -> None:
        """Let the rows of a complete step go."""
        for port in self._ports.values():
            port.flush()

    def report(self) -> None:
        """Send a load report to all routers now, not with the next interval."""
        for port in self._ports.values():
            port.request_load()

    def close(self, reason: str) -> None:
        """Leave every router, after what waits to be sent."""
        for port in self._ports.values():
            port.leave(reason)

    def _set_turn(self, link: int, *, wanted: bool) -> None:
        before = next(iter(self.turns), None)
        if wanted:
            self.turns.setdefault(link)
        else:
            self.turns.pop(link, None)
        if next(iter(self.turns), None) != before:
            self._turn_since = None
            self.report()
