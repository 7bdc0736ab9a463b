"""The router's end of an engine's Attach stream: what is to be written, and what runs there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from catenary.v1 import common_pb2, engine_pb2
from services.router.dispatch.sequence import LiveSequence
from services.router.fleet import Engine


class EngineLink:
    """Outbox of one attachment. Nothing here blocks; the stream's writer drains `messages`.

    It is bounded without a queue limit: an unsent submit is taken back by its abort, one abort at most
    follows a sent submit, renewals merge, and submits are bounded by admission.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.sequences: dict[int, LiveSequence] = {}
        self.error: common_pb2.Error | None = None
        self._submits: dict[int, common_pb2.Submit] = {}
        self._aborts: dict[int, None] = {}
        self._renewal: int | None = None
        self._drain: engine_pb2.DrainEngine | None = None
        # In the order in which they are written: the first before the submits, the others after them.
        self._wanted = False
        self._given_back = False
        self._wanted_again = False
        self._closed = False
        self._ended = asyncio.Event()
        self._wake = asyncio.Event()

    @property
    def closed(self) -> bool:
        """No message will be taken or handed out any more."""
        return self._closed

    def submit(self, submit: common_pb2.Submit) -> None:
        """Queue a submit."""
        if self._wanted_again:
            # It may be the one that the engine is wanted for, and must not come before that word. The engine
            # is still kept, and stays so.
            self._wanted, self._given_back, self._wanted_again = True, False, False
        self._submits[submit.handle] = submit
        self._wake.set()

    def abort(self, engine_handle: int) -> bool:
        """Queue an abort. True if the submit was still here: it is taken back, nothing is sent."""
        if self._submits.pop(engine_handle, None) is not None:
            return True
        self._aborts[engine_handle] = None
        self._wake.set()
        return False

    def renew(self, report_sequence: int) -> None:
        """Queue the answer to a report; a later one replaces it."""
        self._renewal = report_sequence
        self._wake.set()

    def keep(self, *, wanted: bool) -> None:
        """Queue that the engine is wanted empty, before the submits that wait, or no longer, after them: whom
        it was kept for is among them. To give it back and want it again is both told, else a router with much
        to do would never pass its turn on."""
        if wanted:
            self._wanted_again = self._given_back
            self._wanted = self._wanted or not self._given_back
        else:
            self._given_back, self._wanted_again = True, False
        self._wake.set()

    def drain(self, order: engine_pb2.DrainEngine) -> None:
        """Queue an order to drain; a later one replaces one that waits."""
        self._drain = order
        self._wake.set()

    def close(self, error: common_pb2.Error | None = None) -> None:
        """End the stream; with `error`, as a refusal. The first close decides."""
        if self._closed:
            return
        self._closed = True
        self._ended.set()
        self.error = error
        self._submits.clear()
        self._aborts.clear()
        self._wake.set()

    async def ended(self) -> None:
        """Wait until the link is closed."""
        await self._ended.wait()

    async def messages(self) -> AsyncIterator[engine_pb2.AttachResponse]:
        """The messages to write, in order, until the link is closed."""
        while not self._closed:
            self._wake.clear()
            while (message := self._next()) is not None:
                yield message
            if not self._wake.is_set():
                await self._wake.wait()

    def _next(self) -> engine_pb2.AttachResponse | None:
        if self._closed:
            return None
        if self._renewal is not None:
            renewed = engine_pb2.LeaseRenewed(sequence=self._renewal)
            self._renewal = None
            return engine_pb2.AttachResponse(renewed=renewed)
        if self._aborts:
            handle = next(iter(self._aborts))
            del self._aborts[handle]
            return engine_pb2.AttachResponse(abort=engine_pb2.AbortSequence(handle=handle))
        if self._wanted:
            self._wanted = False
            return _keep(wanted=True)
        if self._submits:
            handle = next(iter(self._submits))
            return engine_pb2.AttachResponse(submit=self._submits.pop(handle))
        if self._given_back:
            self._given_back = False
            self._wanted, self._wanted_again = self._wanted_again, False
            return _keep(wanted=False)
        # After the submits, which the engine still takes.
        if self._drain is not None:
            order, self._drain = self._drain, None
            return engine_pb2.AttachResponse(drain=order)
        return None


def _keep(*, wanted: bool) -> engine_pb2.AttachResponse:
    return engine_pb2.AttachResponse(keep=engine_pb2.KeepEngine(wanted=wanted))
