"""Asks an engine for a profile."""

from __future__ import annotations

from dataclasses import dataclass

import grpc

from catenary.rpc import error_of, open_channel
from catenary.v1 import engine_pb2, engine_pb2_grpc
from catenary_apps.profile.config import ProfileConfig
from catenary_apps.profile.find import Target

# Beyond the time of the profile; the engine gives up earlier by itself.
_MARGIN_S = 90.0


class ProfileError(Exception):
    """The engine's refusal, or its absence, in one line."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """A trace document, and what the engine says about it."""

    trace: bytes
    steps: int
    dropped_events: int


async def fetch(config: ProfileConfig, target: Target) -> Fetched:
    """Take a profile. Raises ProfileError."""
    request = engine_pb2.ProfileRequest(
        steps=config.steps,
        max_ms=max(1, round(config.seconds * 1000)),
        device_activities=config.device_activities,
    )
    trace = bytearray()
    async with open_channel(target.address, secret=target.secret, tls=target.tls) as channel:
        stub = engine_pb2_grpc.EngineServiceStub(channel)
        try:
            async for response in stub.Profile(request, timeout=config.seconds + _MARGIN_S):
                if response.HasField("end"):
                    return Fetched(bytes(trace), response.end.steps, response.end.dropped_events)
                trace += response.trace
        except grpc.aio.AioRpcError as error:
            raise ProfileError(f"{target.address}: {error_of(error).message}") from None
    raise ProfileError(f"{target.address}: the engine's answer is not complete")
