"""Asks running services how far they are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx2

from catenary.rpc import open_channel
from catenary.v1 import engine_pb2, engine_pb2_grpc

PROBE_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class EngineProgress:
    """What an engine says about itself; `fraction` of the start is 0..1 or None."""

    serving: bool
    activity: str
    fraction: float | None = None
    # The failure that keeps it from serving, if it knows one.
    trouble: str = ""
    # What an operator could mend while it serves.
    notes: tuple[str, ...] = ()


STATE_TEXTS = {
    engine_pb2.ENGINE_STATE_STARTING: "starting",
    engine_pb2.ENGINE_STATE_SERVING: "serving",
    engine_pb2.ENGINE_STATE_STALLED: "stalled",
    engine_pb2.ENGINE_STATE_DRAINING: "draining",
    engine_pb2.ENGINE_STATE_NOT_SERVING: "restarting its core",
}


class EngineProbe:
    """Reads one engine's status over its unix socket."""

    def __init__(self, target: str, secret: str) -> None:
        self._socket = Path(target.removeprefix("unix:"))
        self._channel = open_channel(target, secret=secret)
        self._stub = engine_pb2_grpc.EngineServiceStub(self._channel)

    async def read(self) -> EngineProgress:
        """Return the engine's progress; an engine that does not answer is not serving."""
        # Dialling a socket that is not there yet would only lengthen the channel's own backoff.
        if not self._socket.exists():
            return EngineProgress(serving=False, activity="starting")
        try:
            status = await self._stub.GetStatus(engine_pb2.GetStatusRequest(), timeout=PROBE_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return EngineProgress(serving=False, activity="starting")
        attached = status.attached_routers > 0
        serving = status.state == engine_pb2.ENGINE_STATE_SERVING and attached
        return EngineProgress(
            serving=serving,
            activity="serving" if serving else status.activity or STATE_TEXTS.get(status.state, "starting"),
            fraction=status.progress if status.HasField("progress") else None,
            trouble=status.trouble,
            notes=tuple(status.notes),
        )

    async def close(self) -> None:
        await self._channel.close()


class GatewayProbe:
    """Reads a gateway's /ready."""

    def __init__(self) -> None:
        # The certificate names the public host, and this only asks our own child over loopback.
        self._client = httpx2.AsyncClient(verify=False, trust_env=False, timeout=PROBE_TIMEOUT_S)

    async def is_ready(self, base_url: str) -> bool:
        try:
            return (await self._client.get(f"{base_url}/ready")).status_code == 200
        except httpx2.HTTPError:
            return False

    async def close(self) -> None:
        await self._client.aclose()
