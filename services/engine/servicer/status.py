"""EngineService: state, load and start-up progress for operators and supervisors."""

from __future__ import annotations

from typing import Any

import grpc

from catenary.v1 import engine_pb2, engine_pb2_grpc
from services.engine.servicer.hub import EngineHub
from services.engine.servicer.identity import capacity, model_info


class StatusService(engine_pb2_grpc.EngineServiceServicer):
    """Answers from what the servicer knows; never asks the core."""

    def __init__(self, hub: EngineHub, served_model_name: str) -> None:
        self._hub = hub
        self._name = served_model_name

    async def GetStatus(
        self, request: engine_pb2.GetStatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> engine_pb2.GetStatusResponse:
        """The status now."""
        hub = self._hub
        response = engine_pb2.GetStatusResponse(
            state=hub.state,
            load=hub.load(),
            attached_routers=hub.attached_routers,
            core_restarts=hub.core_restarts,
        )
        if hub.ready is not None:
            response.model.CopyFrom(model_info(self._name, hub.ready))
            response.capacity.CopyFrom(capacity(hub.ready))
        if response.state in (engine_pb2.ENGINE_STATE_STARTING, engine_pb2.ENGINE_STATE_NOT_SERVING):
            response.activity = hub.progress.activity
            if hub.progress.fraction is not None:
                response.progress = hub.progress.fraction
        elif hub.graphs.warm < hub.graphs.to_warm:
            response.activity = "warming up beside serving"
            response.progress = hub.graphs.warm / hub.graphs.to_warm
        return response
