"""RouterService, the clients' side of the router: a gateway's Session stream, and plain Generate calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from catenary.resume import Cause, ResumePolicy
from catenary.rpc import RpcError, refuse
from catenary.schema import SCHEMA_REVISION, revision_mismatch
from catenary.sequence_limits import MAX_NAME
from catenary.telemetry import current_traceparent, get_logger
from catenary.v1 import common_pb2, engine_pb2, router_pb2, router_pb2_grpc
from services.router.admission import CLASSES, Admission, LaneView, Refused, RefusedFor
from services.router.dispatch import (
    AbortCause,
    Dispatcher,
    Membership,
    PlainCall,
    Session,
    Sessions,
)
from services.router.fleet import BreakerState, Engine, Fleet
from services.router.index import KvIndex
from services.router.placement import ReceiptBook
from services.router.service.streams import (
    INTERNAL,
    SLOW_READER,
    Cut,
    ReaderWatch,
    first_message,
    serve_stream,
)

_log = get_logger(__name__)


class GenerateCalls:
    """Serves Generate calls. A sequence that loses its engine is resumed on another one."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        watch: ReaderWatch,
        policy: ResumePolicy,
        on_resumed: Callable[[Cause], None],
    ) -> None:
        self._dispatcher = dispatcher
        self._watch = watch
        self._policy = policy
        self._on_resumed = on_resumed

    async def serve(self, request: router_pb2.GenerateRequest) -> AsyncIterator[router_pb2.GenerateResponse]:
        """Serve one call to its end. Whatever ends it, the sequence is not left running."""
        spec = request.spec
        if not spec.traceparent and (traceparent := current_traceparent()):
            spec.traceparent = traceparent
        try:
            running = PlainCall(self._dispatcher, spec, self._policy, self._on_resumed)
        except Refused as refusal:
            raise RpcError(refusal.error) from None
        cut = Cut()
        watched = self._watch.add(lambda strikes: self._not_reading(strikes, running, cut))
        try:
            async for response in running.messages():
                watched.writing()
                yield response
                watched.written()
        except Refused as refusal:
            raise RpcError(refusal.error) from None
        except GeneratorExit:
            cut.explain(SLOW_READER)
            raise
        finally:
            self._watch.remove(watched)
            running.abandon(AbortCause.DISCONNECT)

    def _not_reading(self, strikes: int, running: PlainCall, cut: Cut) -> None:
        """Abort the sequence with an error that waits for the client; the second time, cut the call."""
        if strikes > 1:
            cut.now()
            return
        _log.warning("client does not read; its sequence is aborted", sequence=running.request_id)
        running.give_up(SLOW_READER, AbortCause.SLOW_READER)


class _SessionStream:
    """The stream of one session; see AcceptedStream."""

    def __init__(
        self,
        sessions: Sessions,
        session: Session,
        requests: AsyncIterator[router_pb2.SessionRequest],
        instance: str,
        welcome: router_pb2.SessionWelcome,
    ) -> None:
        self._sessions = sessions
        self._session = session
        self._requests = requests
        self._instance = instance
        self._welcome = welcome
        self.error: common_pb2.Error | None = None

    def welcome(self) -> router_pb2.SessionResponse:
        return router_pb2.SessionResponse(welcome=self._welcome)

    def messages(self) -> AsyncIterator[router_pb2.SessionResponse]:
        return self._session.outbox.messages()

    async def read(self) -> None:
        session = self._session
        try:
            async for request in self._requests:
                session.receive(request)
                # Write the submit first: to ask for the next message takes longer.
                await asyncio.sleep(0)
                await session.outbox.room()
        except (Refused, RpcError) as refusal:
            self.error = refusal.error
        except (grpc.aio.InternalError, grpc.aio.UsageError):
            _log.debug("session stream broke")
        except Exception:
            _log.exception("session message failed")
            self.error = INTERNAL
        self._sessions.close(session, AbortCause.SESSION_END)

    def stalled(self) -> None:
        _log.warning("gateway does not read; its session is ended", instance=self._instance)
        self._sessions.close(self._session, AbortCause.SLOW_READER)

    def close(self) -> None:
        self._sessions.close(self._session, AbortCause.SESSION_END)
        _log.info("gateway left", instance=self._instance)


class SessionStreams:
    """Serves Session streams of gateways, each with a session of `sessions`."""

    def __init__(
        self,
        sessions: Sessions,
        watch: ReaderWatch,
        *,
        router_instance_id: str,
        heartbeat_ms: int,
        hello_timeout_s: float,
    ) -> None:
        self._sessions = sessions
        self._watch = watch
        self._welcome = router_pb2.SessionWelcome(
            schema_revision=SCHEMA_REVISION,
            router_instance_id=router_instance_id,
            heartbeat_ms=heartbeat_ms,
        )
        self._hello_timeout_s = hello_timeout_s

    def serve(
        self, requests: AsyncIterator[router_pb2.SessionRequest]
    ) -> AsyncIterator[router_pb2.SessionResponse]:
        """Serve one stream to its end. Raises RpcError as `serve_stream` does."""
        return serve_stream(lambda: self._accept(requests), self._watch)

    async def _accept(self, requests: AsyncIterator[router_pb2.SessionRequest]) -> _SessionStream:
        first = await first_message(requests, "hello", timeout_s=self._hello_timeout_s)
        _check(first.hello)
        try:
            session = self._sessions.open()
        except Refused as refusal:
            raise RpcError(refusal.error) from None
        instance = first.hello.instance_id
        _log.info("gateway connected", instance=instance)
        return _SessionStream(self._sessions, session, requests, instance, self._welcome)


def _check(hello: router_pb2.SessionHello) -> None:
    mismatch = revision_mismatch(hello.schema_revision, hello.minimum_peer_revision, peer="gateway")
    if mismatch is not None:
        raise refuse(common_pb2.ERROR_CODE_SCHEMA_MISMATCH, mismatch)
    if not 1 <= len(hello.instance_id) <= MAX_NAME:
        raise refuse(
            common_pb2.ERROR_CODE_INVALID_ARGUMENT,
            f"The hello's instance_id must have 1 to {MAX_NAME} characters.",
            param="instance_id",
        )


# Receipts in one answer.
MAX_EXPLAINED = 256

_BREAKERS = {
    BreakerState.CLOSED: router_pb2.BREAKER_STATE_CLOSED,
    BreakerState.OPEN: router_pb2.BREAKER_STATE_OPEN,
    BreakerState.HALF_OPEN: router_pb2.BREAKER_STATE_HALF_OPEN,
}

_Context = grpc.aio.ServicerContext[Any, Any]


class RouterServicer(router_pb2_grpc.RouterServiceServicer):
    """The methods of RouterService."""

    def __init__(
        self,
        fleet: Fleet,
        admission: Admission,
        dispatcher: Dispatcher,
        sessions: Sessions,
        streams: SessionStreams,
        calls: GenerateCalls,
        index: KvIndex[Engine],
        receipts: ReceiptBook,
        membership: Membership,
        *,
        router_instance_id: str,
    ) -> None:
        self._fleet = fleet
        self._admission = admission
        self._dispatcher = dispatcher
        self._sessions = sessions
        self._streams = streams
        self._calls = calls
        self._index = index
        self._receipts = receipts
        self._membership = membership
        self._router_instance_id = router_instance_id

    def Session(
        self, request_iterator: AsyncIterator[router_pb2.SessionRequest], context: _Context
    ) -> AsyncIterator[router_pb2.SessionResponse]:
        """See the proto."""
        return self._streams.serve(request_iterator)

    def Generate(
        self, request: router_pb2.GenerateRequest, context: _Context
    ) -> AsyncIterator[router_pb2.GenerateResponse]:
        """See the proto."""
        return self._calls.serve(request)

    async def ListModels(
        self, request: router_pb2.ListModelsRequest, context: _Context
    ) -> router_pb2.ListModelsResponse:
        """See the proto."""
        return router_pb2.ListModelsResponse(models=self._fleet.served_models())

    async def GetFleet(
        self, request: router_pb2.GetFleetRequest, context: _Context
    ) -> router_pb2.GetFleetResponse:
        """See the proto."""
        now = time.monotonic()
        return router_pb2.GetFleetResponse(
            router_instance_id=self._router_instance_id,
            engines=[_fleet_engine(engine, self._index, now) for engine in self._fleet],
            sessions=len(self._sessions),
            live_sequences=self._admission.live_sequences,
            lanes=[
                _lane(number, view)
                for number, view in zip(CLASSES, self._dispatcher.lifecycle.lanes(), strict=True)
            ],
            draining=self._admission.draining,
            resumed_sequences=self._dispatcher.lifecycle.resumed,
        )

    async def Explain(
        self, request: router_pb2.ExplainRequest, context: _Context
    ) -> router_pb2.ExplainResponse:
        """See the proto."""
        limit = min(request.limit or MAX_EXPLAINED, MAX_EXPLAINED)
        request_id = request.request_id if request.HasField("request_id") else None
        receipts = self._receipts.find(request_id, limit)
        return router_pb2.ExplainResponse(receipts=[receipt.message() for receipt in receipts])

    async def Drain(self, request: router_pb2.DrainRequest, context: _Context) -> router_pb2.DrainResponse:
        """See the proto."""
        deadline_ms = request.deadline_ms if request.HasField("deadline_ms") else None
        if not (draining := self._membership.drain(request.engine, deadline_ms)):
            # The code says what its status does: NOT_FOUND.
            text = "No engine of this instance id or name is attached here."
            raise refuse(common_pb2.ERROR_CODE_MODEL_NOT_FOUND, text, param="engine")
        return router_pb2.DrainResponse(draining=draining)


def _lane(number: common_pb2.PriorityClass.ValueType, view: LaneView) -> router_pb2.Lane:
    refused = view.counts.refused
    return router_pb2.Lane(
        priority_class=number,
        queued_sequences=view.queued_sequences,
        queued_tokens=view.queued_tokens,
        tenants=view.tenants,
        oldest_wait_ms=round(view.oldest_wait_s * 1000),
        live_sequences=view.live_sequences,
        admitted=view.counts.admitted,
        refused=sum(refused.values()) - refused[RefusedFor.WAITED_TOO_LONG],
        timed_out=refused[RefusedFor.WAITED_TOO_LONG],
        promoted=view.counts.promoted,
    )


def _fleet_engine(engine: Engine, index: KvIndex[Engine], now: float) -> router_pb2.FleetEngine:
    load = engine.report
    if load is None:
        load = engine_pb2.LoadReport(state=engine.state, total_blocks=engine.capacity.total_blocks)
    return router_pb2.FleetEngine(
        instance_id=engine.instance_id,
        engine_name=engine.name,
        device=engine.device,
        lease_epoch=engine.epoch,
        model=engine.model,
        capacity=engine.capacity,
        load=load,
        state=engine.seen_state,
        placed_sequences=engine.placed_sequences,
        placed_tokens=engine.placed_tokens,
        role=engine.role,
        breaker=_BREAKERS[engine.breaker.state],
        report_age_ms=max(0, round((now - engine.reported_at) * 1000)),
        indexed_blocks=index.blocks(engine),
        index_complete=index.complete(engine),
    )
