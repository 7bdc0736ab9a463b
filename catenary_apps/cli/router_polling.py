"""Asks routers for their fleets, as often as one likes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from catenary.client import AsyncClient
from catenary.rpc import AddressFamilies, RpcError, TcpAddress, is_name, parse_address, resolve
from catenary.v1 import router_pb2
from catenary_apps.cli.router_target import RouterTarget


@dataclass(frozen=True, slots=True)
class RouterView:
    """What one router answered, or why it did not. `at`: when, in seconds of time.monotonic."""

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
        """Every router's answer, in a stable order. Raises StartRefused if TLS files are bad."""
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
