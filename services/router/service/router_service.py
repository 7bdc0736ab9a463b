"""RouterService: the clients' side of the router."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import grpc

from catenary.rpc import refuse
from catenary.v1 import common_pb2, engine_pb2, router_pb2, router_pb2_grpc
from services.router.admission import CLASSES, Admission, LaneView, RefusedFor
from services.router.dispatch import Dispatcher, Membership, SessionHub
from services.router.fleet import BreakerState, Engine, Fleet
from services.router.index import KvIndex
from services.router.placement import ReceiptBook
from services.router.service.generate import GenerateCalls
from services.router.service.sessions import SessionStreams

# Receipts in one answer.
MAX_EXPLAINED = 256

_BREAKERS = {
    BreakerState.CLOSED: router_pb2.BREAKER_STATE_CLOSED,
    BreakerState.OPEN: router_pb2.BREAKER_STATE_OPEN,
    BreakerState.HALF_OPEN: router_pb2.BREAKER_STATE_HALF_OPEN,
}

_Context = grpc.aio.ServicerContext[Any, Any]


class RouterServicer(router_pb2_grpc.RouterServiceServicer):
    """Thin: each method hands over to what does the work."""

    def __init__(
        self,
        fleet: Fleet,
        admission: Admission,
        dispatcher: Dispatcher,
        hub: SessionHub,
        sessions: SessionStreams,
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
        self._hub = hub
        self._sessions = sessions
        self._calls = calls
        self._index = index
        self._receipts = receipts
        self._membership = membership
        self._router_instance_id = router_instance_id

    def Session(
        self, request_iterator: AsyncIterator[router_pb2.SessionRequest], context: _Context
    ) -> AsyncIterator[router_pb2.SessionResponse]:
        """See the proto."""
        return self._sessions.serve(request_iterator)

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
            sessions=len(self._hub),
            live_sequences=self._admission.live_sequences,
            lanes=[
                _lane(number, view)
                for number, view in zip(CLASSES, self._dispatcher.intake.lanes(), strict=True)
            ],
            draining=self._admission.draining,
            resumed_sequences=self._dispatcher.intake.resumed,
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
