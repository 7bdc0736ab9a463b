"""Find the routers that a command speaks to, and poll them for their fleets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from google.protobuf.descriptor import EnumDescriptor

from catenary.client import AsyncClient
from catenary.config import ConfigError
from catenary.rpc import (
    CLIENT_SECRET_ENV,
    AddressFamilies,
    RpcError,
    TcpAddress,
    TlsFiles,
    is_name,
    parse_address,
    read_secret,
    resolve,
)
from catenary.runtime import StartRefused
from catenary.v1 import router_pb2
from catenary_apps.cli.router_options import RouterAccess, RouterOptions, RoutersOptions
from catenary_apps.cli.runtime_directory import RuntimeDirectory, choices, running


@dataclass(frozen=True, slots=True)
class RouterTarget:
    """A router and how to reach it."""

    address: str
    secret: str | None = field(repr=False)
    tls: TlsFiles | None


class Access(Protocol):
    """The options of a command that say how it may speak to a service."""

    client_secret_file: Path | None
    tls_ca: Path | None
    tls_cert: Path | None
    tls_key: Path | None


def credentials(config: Access, address: str) -> tuple[str | None, TlsFiles | None]:
    """Return the secret and the TLS files for a service at `address`. Raises StartRefused."""
    file = config.client_secret_file
    if file is None and address.startswith("unix:"):
        # Beside the sockets of a `catenary up`, in a directory that only its owner can enter.
        beside = RuntimeDirectory(Path(address.removeprefix("unix:")).parent).client_secret
        file = beside if beside.is_file() else None
    tls = None
    if config.tls_ca or config.tls_cert or config.tls_key:
        tls = TlsFiles(config.tls_cert, config.tls_key, config.tls_ca)
    return read_secret(file, CLIENT_SECRET_ENV, option="client_secret_file"), tls


def find_router(config: RouterOptions) -> RouterTarget:
    """Return the router that the options mean. Raises StartRefused if there is none, or more than one."""
    return _target(config.router or _router_here(), config)


def find_routers(config: RoutersOptions) -> tuple[RouterTarget, ...]:
    """Return the routers that the options mean, at least one. Raises StartRefused as `find_router`."""
    addresses = dict.fromkeys(config.router or _routers_here())
    return tuple(_target(address, config) for address in addresses)


def _target(address: str, config: RouterAccess) -> RouterTarget:
    try:
        parse_address(address)
    except ValueError as error:
        raise ConfigError(f"--router {address}: {error}") from None
    return RouterTarget(address, *credentials(config, address))


def _router_here() -> str:
    """Return one router of the `catenary up` here.

    An engine that one of several tells to drain drains for all.
    """
    return _routers_here()[0]


def _routers_here() -> list[str]:
    runs = list(running())
    if len(runs) == 1:
        return runs[0].sockets("router")
    if runs:
        found = choices((run, address) for run in runs for address in run.sockets("router"))
        raise ConfigError(f"--router: more than one catenary up runs on this machine: choose one of {found}")
    raise StartRefused("no catenary up of yours runs on this machine: give --router the address of a router")


@dataclass(frozen=True, slots=True)
class RouterView:
    """A router's answer, or the reason for none. `at`: its moment, in seconds of time.monotonic."""

    address: str
    fleet: router_pb2.GetFleetResponse | None
    error: str | None
    at: float


class RouterPoller:
    """Keeps a client for each router; a name is looked up again with each poll."""

    def __init__(self, targets: Sequence[RouterTarget], *, timeout_s: float) -> None:
        """`timeout_s`: for an answer; one that takes longer is away."""
        self._targets = targets
        self._timeout_s = timeout_s
        self._clients: dict[str, AsyncClient] = {}
        # Where none answers by one IP version, the next poll takes the other.
        self._families = AddressFamilies(patience_s=0)
        self._answered: set[str] = set()

    async def poll(self) -> list[RouterView]:
        """Return every router's answer, in a stable order. Raises StartRefused if TLS files are bad."""
        there: set[str] = set()
        asked = await asyncio.gather(*(self._places(target) for target in self._targets))
        views: list[RouterView] = []
        calls = []
        for target, addresses in zip(self._targets, asked, strict=True):
            if not addresses:
                error = "The name cannot be resolved."
                views.append(RouterView(target.address, None, error, time.monotonic()))
            for address in addresses:
                if address not in there:
                    there.add(address)
                    calls.append(self._ask(address, self._client(address, target)))
        views += await asyncio.gather(*calls)
        self._answered = {view.address for view in views if view.fleet is not None}
        for address in self._clients.keys() - there:
            await self._clients.pop(address).aclose()
        return views

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for client in self._clients.values():
            await client.aclose()

    async def _places(self, target: RouterTarget) -> list[str]:
        if not is_name(target.address):
            return [target.address]
        try:
            async with asyncio.timeout(self._timeout_s):
                found = await resolve(target.address)
        except OSError:
            # A TimeoutError is one, too.
            return []
        chosen = self._families.choose(target.address, found, self._answered)
        # gRPC tries both IP versions of a name itself.
        return chosen if len(chosen) > 1 else [target.address]

    def _client(self, address: str, target: RouterTarget) -> AsyncClient:
        if address not in self._clients:
            named = parse_address(target.address)
            name = named.host if isinstance(named, TcpAddress) and address != target.address else None
            self._clients[address] = AsyncClient(
                address,
                secret=target.secret,
                tls=target.tls,
                server_name=name,
                timeout_s=self._timeout_s,
                max_retries=0,
            )
        return self._clients[address]

    async def _ask(self, address: str, client: AsyncClient) -> RouterView:
        try:
            fleet = await client.fleet()
        except RpcError as error:
            return RouterView(address, None, str(error), time.monotonic())
        return RouterView(address, fleet, None, time.monotonic())


# What the protos say that UNSPECIFIED stands for.
_UNSPECIFIED = {"EngineRole": "both", "BreakerState": "closed", "PriorityClass": "default"}


def enum_word(enum: EnumDescriptor, number: int) -> str:
    """Return a value of an enum in lower case and without the enum's prefix; `unknown` for a later
    revision's."""
    if number == 0 and enum.name in _UNSPECIFIED:
        return _UNSPECIFIED[enum.name]
    prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    value = enum.values_by_number.get(number)
    return "unknown" if value is None else value.name.removeprefix(prefix).lower()
