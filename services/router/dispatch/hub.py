"""All sessions, and what they are told about the models."""

from __future__ import annotations

import asyncio

from catenary.v1 import common_pb2, router_pb2
from services.router.admission import Refused
from services.router.dispatch.dispatcher import Dispatcher
from services.router.dispatch.outbox import SessionOutbox
from services.router.dispatch.sequence import AbortCause
from services.router.dispatch.session import Session
from services.router.fleet import Fleet


class SessionHub:
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
        """A new session, with the models as its first news.

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
        """Tell every gateway, also those that come yet, that the router ends within so many milliseconds."""
        self._draining = router_pb2.RouterDraining(deadline_ms=deadline_ms)
        for session in self._sessions:
            session.outbox.answer(router_pb2.SessionResponse(draining=self._draining))

    def shed(self) -> None:
        """Tell the gateways what is shed, if that is not what they know."""
        state = self._dispatcher.intake.shed_state()
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
