"""Find the engine that the options name and fetch a profile from it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from catenary.config import ConfigError
from catenary.rpc import TlsFiles, error_of, open_channel, parse_address
from catenary.runtime import StartRefused
from catenary.v1 import engine_pb2, engine_pb2_grpc
from catenary_apps.cli.routers import credentials
from catenary_apps.cli.runtime_directory import RuntimeDirectory, choices, running
from catenary_apps.profile.config import ProfileConfig

_NAME = re.compile(r"engine-\d+")


@dataclass(frozen=True, slots=True)
class Target:
    """An engine's status service."""

    address: str
    secret: str | None = field(repr=False)
    tls: TlsFiles | None


def find_engine(config: ProfileConfig) -> Target:
    """Return the engine that the options mean. Raises StartRefused if there is none, or more than one."""
    name = config.engine or "engine-0"
    address = _engine_here(name) if _NAME.fullmatch(name) else name
    try:
        parse_address(address)
    except ValueError as error:
        raise ConfigError(f"--engine {address}: {error}") from None
    return Target(address, *credentials(config, address))


def _engine_here(name: str) -> str:
    having = [run for run in running() if _socket(run, name).exists()]
    if len(having) == 1:
        return having[0].socket(name)
    if having:
        found = choices((run, run.socket(name)) for run in having)
        raise ConfigError(f"--engine: more than one catenary up runs on this machine: choose one of {found}")
    raise StartRefused(
        f"no catenary up of yours runs on this machine with an {name}: give --engine the address of an "
        "engine's status service (its --listen)"
    )


def _socket(run: RuntimeDirectory, name: str) -> Path:
    return Path(run.socket(name).removeprefix("unix:"))


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
