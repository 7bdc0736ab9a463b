"""grpc.health.v1: the empty name is the process, a service's name is its readiness."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any, TypeAlias

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

LIVENESS = ""
# Streams of grpc.health.v1 Watch: probes use Check, and only a few supervisors watch.
MAX_WATCHERS = 64

_Status = health_pb2.HealthCheckResponse
_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class HealthBoard:
    """The states that the health service reports. Setting never waits for a watcher, however slowly that one
    reads.

    All services are NOT_SERVING until they are set. After `pin` they stay NOT_SERVING; liveness follows the
    process alone.
    """

    def __init__(self, services: Iterable[str]) -> None:
        self._serving: dict[str, bool] = {LIVENESS: False, **dict.fromkeys(services, False)}
        self._pinned = False
        self._closed = False
        self._changed = asyncio.Event()

    def set(self, service: str, serving: bool) -> None:
        """Publish a service's readiness; no effect on readiness once the board is pinned."""
        if self._pinned and service != LIVENESS:
            serving = False
        if self._serving.get(service) is not serving:
            self._serving[service] = serving
            self._notify()

    def pin(self) -> None:
        """Make every service NOT_SERVING from now on: the process drains."""
        self._pinned = True
        for service in self._serving:
            if service != LIVENESS:
                self._serving[service] = False
        self._notify()

    def close(self) -> None:
        """End liveness and all watches: the process ends."""
        self._serving[LIVENESS] = False
        self._closed = True
        self._notify()

    def get(self, service: str) -> bool | None:
        """Whether the service serves, or None if there is no such service."""
        return self._serving.get(service)

    def statuses(self) -> dict[str, bool]:
        """Return all services with their state."""
        return dict(self._serving)

    async def watch(self, service: str) -> AsyncIterator[bool | None]:
        """Yield the state now and after each change, the newest only, until the board is closed."""
        last: object = self
        while True:
            changed, state = self._changed, self._serving.get(service)
            if state is not last:
                last = state
                # The reader may take its time over this: look again before waiting or leaving.
                yield state
            elif self._closed:
                return
            else:
                await changed.wait()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """The gRPC face of a board. Open to everyone, so its streams are limited."""

    def __init__(self, board: HealthBoard) -> None:
        self._board = board
        self._watchers = 0

    async def Check(self, request: Any, context: _Context) -> Any:
        serving = self._board.get(request.service)
        if serving is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "There is no service of this name.")
        return _Status(status=_status(serving))

    async def List(self, request: Any, context: _Context) -> Any:
        states = self._board.statuses().items()
        return health_pb2.HealthListResponse(
            statuses={service: _Status(status=_status(serving)) for service, serving in states}
        )

    async def Watch(self, request: Any, context: _Context) -> AsyncIterator[Any]:
        if self._watchers >= MAX_WATCHERS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"More than {MAX_WATCHERS} watchers.")
        self._watchers += 1
        try:
            async for serving in self._board.watch(request.service):
                yield _Status(status=_status(serving))
        finally:
            self._watchers -= 1


def _status(serving: bool | None) -> Any:
    if serving is None:
        return _Status.SERVICE_UNKNOWN
    return _Status.SERVING if serving else _Status.NOT_SERVING
