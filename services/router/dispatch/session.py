"""The sessions of gateways: handles, sequences and outbox of each, and the messages to all of them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator

from catenary.columns import StepRow
from catenary.outbox import Messages, Outbox, Steps
from catenary.v1 import common_pb2, engine_pb2, router_pb2
from services.router.admission import Refused
from services.router.dispatch.dispatcher import Dispatcher
from services.router.dispatch.sequence import AbortCause, LiveSequence
from services.router.fleet import Fleet


class SessionOutbox(Outbox[router_pb2.SessionResponse]):
    """Outbox of one Session: answers, then what replaces itself, then rows. The limit is `max_unread`.

    The steps of all engines that arrive during a write become one message. Answers and rows that ended add up
    with each request; the reader of the session waits for `room` before it takes the next one.
    """

    def __init__(self, *, max_unread: int) -> None:
        self._answers: Messages[router_pb2.SessionResponse] = Messages()
        self._models: Messages[router_pb2.SessionResponse] = Messages()
        self._shed: Messages[router_pb2.SessionResponse] = Messages()
        self.steps: Steps[router_pb2.SessionResponse] = Steps(_step)
        """Rows that are put here wake no writer: see `wake`."""
        super().__init__(self._answers, self._models, self._shed, self.steps, limit=max_unread)

    def answer(self, response: router_pb2.SessionResponse) -> None:
        """Queue a refusal or an abort result."""
        self.put(self._answers, response)

    def models(self, update: router_pb2.ModelsUpdate) -> None:
        """Queue an update; it replaces one that waits."""
        self.put(self._models, router_pb2.SessionResponse(models=update), "models")

    def shed(self, state: router_pb2.ShedState) -> None:
        """Queue the state of load shedding; it replaces one that waits."""
        self.put(self._shed, router_pb2.SessionResponse(shed=state), "shed")

    async def messages(self) -> AsyncIterator[router_pb2.SessionResponse]:
        """Yield the messages to write until the outbox is closed and empty."""
        while (message := await self.next()) is not None:
            yield message


def _step(step: common_pb2.StepOutput) -> router_pb2.SessionResponse:
    return router_pb2.SessionResponse(step=step)


# Ended handles that are remembered, to tell a late abort from an unknown one and to refuse a handle's reuse.
REMEMBERED_HANDLES = 4096


class Session:
    """The sink of all sequences of one gateway."""

    def __init__(self, dispatcher: Dispatcher, outbox: SessionOutbox) -> None:
        self.outbox = outbox
        self._dispatcher = dispatcher
        self._live: dict[int, LiveSequence] = {}
        # Handles of live ones that have had no output yet.
        self._silent: set[int] = set()
        self._request_ids: set[str] = set()
        self._ended: OrderedDict[int, None] = OrderedDict()
        self._closed = False

    def receive(self, request: router_pb2.SessionRequest) -> None:
        """Handle a message after the hello.

        Raises:
            Refused: the message has no place here; the stream ends.
        """
        if self._closed:
            # Read before the end of the stream took effect: a sequence of it would never be aborted.
            return
        match request.WhichOneof("payload"):
            case "submit":
                self._submit(request.submit)
            case "abort":
                self._abort(request.abort.handle)
            case _:
                raise Refused(
                    common_pb2.ERROR_CODE_INVALID_ARGUMENT, "Only the first message of a session is a hello."
                )

    def close(self, cause: AbortCause) -> None:
        """End the session and abort its sequences. Idempotent.

        The unread messages are dropped, unless the router drains.
        """
        if self._closed:
            return
        self._closed = True
        for sequence in list(self._live.values()):
            self._dispatcher.abandon(sequence, cause)
        self._live.clear()
        self._silent.clear()
        self._request_ids.clear()
        self.outbox.close(flush=cause is AbortCause.DRAIN)

    def row(self, handle: int) -> StepRow:
        """See Sink."""
        if handle in self._silent:
            self._silent.remove(handle)
            row = self.outbox.steps.row(handle, first=True)
        else:
            row = self.outbox.steps.row(handle)
        if not row.token_ids:
            # A row with tokens has woken the writer before.
            self.outbox.wake()
        return row

    def end(self, handle: int, end: common_pb2.SequenceEnd) -> None:
        """See Sink."""
        self._forget(handle)
        self.outbox.steps.row(handle).end = end
        self.outbox.wake()

    def refuse(self, handle: int, error: common_pb2.Error) -> None:
        """See Sink."""
        self._forget(handle)
        self._answer_refusal(handle, error)

    def abort_result(self, handle: int, outcome: common_pb2.AbortOutcome.ValueType) -> None:
        """See Sink."""
        result = engine_pb2.AbortResult(handle=handle, outcome=outcome)
        self.outbox.answer(router_pb2.SessionResponse(abort_result=result))

    def _submit(self, submit: common_pb2.Submit) -> None:
        handle, spec = submit.handle, submit.spec
        try:
            if handle in self._live or handle in self._ended:
                raise _duplicate("The handle is in use on this session.")
            if spec.request_id and spec.request_id in self._request_ids:
                raise _duplicate("A sequence with this request id is live on this session.")
            if submit.prefill_only or submit.HasField("kv_offer"):
                raise Refused(
                    common_pb2.ERROR_CODE_INVALID_ARGUMENT,
                    "What one engine computes for another is the router's to say.",
                    param="prefill_only" if submit.prefill_only else "kv_offer",
                )
            # A hint: a handle that is not live means nothing.
            leader = self._live.get(submit.same_prompt_as) if submit.HasField("same_prompt_as") else None
            sequence = self._dispatcher.submit(
                handle, spec, self, same_prompt_as=leader, resumed=submit.resumed, quarantined=submit.alone
            )
        except Refused as refusal:
            self._answer_refusal(handle, refusal.error)
            return
        self._live[handle] = sequence
        self._silent.add(handle)
        self._request_ids.add(sequence.spec.request_id)

    def _abort(self, handle: int) -> None:
        sequence = self._live.get(handle)
        if sequence is not None:
            self._dispatcher.abort(sequence, AbortCause.CLIENT, answer=True)
        elif handle in self._ended:
            self.abort_result(handle, common_pb2.ABORT_OUTCOME_ALREADY_FINISHED)
        else:
            self.abort_result(handle, common_pb2.ABORT_OUTCOME_UNKNOWN)

    def _answer_refusal(self, handle: int, error: common_pb2.Error) -> None:
        refusal = common_pb2.Refusal(handle=handle, error=error)
        self.outbox.answer(router_pb2.SessionResponse(refusal=refusal))

    def _forget(self, handle: int) -> None:
        sequence = self._live.pop(handle, None)
        if sequence is None:
            return
        self._silent.discard(handle)
        self._request_ids.discard(sequence.spec.request_id)
        self._ended[handle] = None
        if len(self._ended) > REMEMBERED_HANDLES:
            self._ended.popitem(last=False)


def _duplicate(message: str) -> Refused:
    return Refused(common_pb2.ERROR_CODE_DUPLICATE_REQUEST, message)


class Sessions:
    """Opens and closes sessions and pushes ModelsUpdate to them.

    `changed` is called at each change of membership or state: changes of one tick make one update. `tick` is
    called about once a second and pushes if the load has changed since. `beat` is called in each heartbeat.
    """

    def __init__(self, fleet: Fleet, dispatcher: Dispatcher, *, max_sessions: int, max_unread: int) -> None:
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._max_sessions = max_sessions
        self._max_unread = max_unread
        self._sessions: set[Session] = set()
        self._published = router_pb2.ModelsUpdate()
        self._push_due = False
        self._shed = router_pb2.ShedState()
        self._draining: router_pb2.RouterDraining | None = None

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self) -> Session:
        """Open a session; its first message tells the models.

        Raises:
            Refused: OVERLOADED at the limit of sessions.
        """
        if len(self._sessions) >= self._max_sessions:
            raise Refused(
                common_pb2.ERROR_CODE_OVERLOADED,
                f"The router has its limit of {self._max_sessions} sessions (max-sessions).",
                retryable=True,
            )
        session = Session(self._dispatcher, SessionOutbox(max_unread=self._max_unread))
        if self._draining is not None:
            session.outbox.answer(router_pb2.SessionResponse(draining=self._draining))
        session.outbox.models(self._update())
        if self._shed.entries:
            session.outbox.shed(self._shed)
        self._sessions.add(session)
        return session

    def close(self, session: Session, cause: AbortCause) -> None:
        """End a session and abort its sequences. Idempotent."""
        self._sessions.discard(session)
        session.close(cause)

    def close_all(self, cause: AbortCause) -> None:
        """End every session: the router stops."""
        for session in list(self._sessions):
            self.close(session, cause)

    def drain(self, deadline_ms: int) -> None:
        """Tell all gateways, present and future, that the router ends within so many milliseconds."""
        self._draining = router_pb2.RouterDraining(deadline_ms=deadline_ms)
        for session in self._sessions:
            session.outbox.answer(router_pb2.SessionResponse(draining=self._draining))

    def shed(self) -> None:
        """Tell the gateways which load is shed, if that has changed."""
        state = self._dispatcher.lifecycle.shed_state()
        if state is None:
            return
        self._shed = state
        for session in self._sessions:
            session.outbox.shed(state)

    def changed(self) -> None:
        """Push an update soon, once for all changes of this tick."""
        if not self._push_due:
            self._push_due = True
            asyncio.get_running_loop().call_soon(self._push)

    def tick(self) -> None:
        """Push an update if anything in it has changed."""
        if self._update() != self._published:
            self.changed()

    def beat(self) -> None:
        """Push an update even if nothing has changed: gateways take silence for a router that is lost.

        Whatever hinders a new update, the last one is sent in its place, and the reason raised.
        """
        try:
            self._published = self._update()
        finally:
            self._send()

    def _push(self) -> None:
        self._push_due = False
        self._published = self._update()
        self._send()

    def _send(self) -> None:
        for session in self._sessions:
            session.outbox.models(self._published)

    def _update(self) -> router_pb2.ModelsUpdate:
        return router_pb2.ModelsUpdate(models=self._fleet.served_models())
