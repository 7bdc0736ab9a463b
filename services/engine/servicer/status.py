"""EngineService: state, load, start-up progress and profiles for operators and supervisors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc

from catenary.rpc import refuse
from catenary.v1 import common_pb2, engine_pb2, engine_pb2_grpc
from services.engine.link import ProfilePart
from services.engine.servicer.contract import capacity, model_info
from services.engine.servicer.frontend import EngineFrontend

_MAX_STEPS = 10_000
_MAX_MS = 3_600_000
# A device's profiler records some thousand activities a step, in the core's memory until the end.
_MAX_STEPS_WITH_DEVICE = 200


class StatusService(engine_pb2_grpc.EngineServiceServicer):
    """The status comes from what the servicer knows; only a profile asks the core."""

    def __init__(self, frontend: EngineFrontend, served_model_name: str) -> None:
        self._frontend = frontend
        self._name = served_model_name

    async def GetStatus(
        self, request: engine_pb2.GetStatusRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> engine_pb2.GetStatusResponse:
        """See the proto."""
        frontend = self._frontend
        response = engine_pb2.GetStatusResponse(
            state=frontend.state,
            load=frontend.load(),
            attached_routers=len(frontend.routers),
            core_restarts=frontend.core_restarts,
            device_counters=frontend.graphs.device,
            trouble=frontend.core_failure or frontend.router_refusal,
        )
        if frontend.ready is not None:
            response.notes.extend(frontend.ready.notes)
            response.model.CopyFrom(model_info(self._name, frontend.ready))
            response.capacity.CopyFrom(capacity(frontend.ready))
        if response.state in (engine_pb2.ENGINE_STATE_STARTING, engine_pb2.ENGINE_STATE_NOT_SERVING):
            response.activity = frontend.progress.activity
            if frontend.progress.fraction is not None:
                response.progress = frontend.progress.fraction
        elif frontend.graphs.warm < frontend.graphs.to_warm:
            response.activity = "warming up beside serving"
            response.progress = frontend.graphs.warm / frontend.graphs.to_warm
        return response

    async def Profile(
        self, request: engine_pb2.ProfileRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[engine_pb2.ProfileResponse]:
        """See the proto."""
        most_steps = _MAX_STEPS_WITH_DEVICE if request.device_activities else _MAX_STEPS
        for name, value, most in (("steps", request.steps, most_steps), ("max_ms", request.max_ms, _MAX_MS)):
            if not 1 <= value <= most:
                text = f"{name} must be 1 to {most}, not {value}."
                raise refuse(common_pb2.ERROR_CODE_INVALID_ARGUMENT, text, param=name)
        profile = self._frontend.profiles.run(
            steps=request.steps,
            seconds=request.max_ms / 1000,
            device_activities=request.device_activities,
        )
        async with aclosing(profile) as messages:
            async for message in messages:
                if isinstance(message, ProfilePart):
                    yield engine_pb2.ProfileResponse(trace=message.data)
                else:
                    end = engine_pb2.ProfileEnd(steps=message.steps, dropped_events=message.dropped_events)
                    yield engine_pb2.ProfileResponse(end=end)
