"""Links to all routers: to each address as configured, and to each that a name stands for now."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from catenary.rpc import NamedAddresses, resolve
from services.engine.servicer.hub import EngineHub
from services.engine.servicer.router_link import RouterLink


@dataclass(slots=True)
class _Target:
    link: RouterLink
    task: asyncio.Task[None]


class RouterLinks:
    """One link for each address. One that a name does not stand for any more is dropped once it is down.

    `make(address, name, attached_elsewhere)` makes a link; `name` is the configured address that led to it.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        make: Callable[[str, str, Callable[[str], bool]], RouterLink],
        hub: EngineHub,
        *,
        look_up: Callable[[str], Awaitable[Sequence[str]]] = resolve,
    ) -> None:
        """Raises ValueError for what is not an address."""
        self._addresses = NamedAddresses(addresses, look_up)
        self._make = make
        self._hub = hub
        self._targets: dict[str, _Target] = {}

    async def run(self) -> None:
        """Keep the links until the engine drains; those that are attached end by themselves then."""
        async with asyncio.TaskGroup() as tasks:
            for address in self._addresses.literal:
                self._add(tasks, address, address)
            while self._addresses.names and not self._hub.draining:
                await self._look_up(tasks)
                attached = any(target.link.attached for target in self._targets.values())
                await asyncio.sleep(self._addresses.pause_s(connected=attached))

    async def _look_up(self, tasks: asyncio.TaskGroup) -> None:
        known = {address: target.link.attached for address, target in self._targets.items()}
        wanted = await self._addresses.wanted(known)
        for address, name in wanted.items():
            if address not in self._targets:
                self._add(tasks, address, name)
        for address, target in list(self._targets.items()):
            if address not in wanted and not target.link.attached:
                del self._targets[address]
                target.task.cancel()
                await asyncio.wait([target.task])

    def _add(self, tasks: asyncio.TaskGroup, address: str, name: str) -> None:
        link = self._make(address, name, lambda router: self._attached_elsewhere(router, address))
        self._targets[address] = _Target(link, tasks.create_task(link.run(), name=f"router {address}"))

    def _attached_elsewhere(self, router: str, address: str) -> bool:
        return any(
            target.link.attached and target.link.router == router
            for other, target in self._targets.items()
            if other != address
        )
