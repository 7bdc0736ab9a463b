"""The routers there are: addresses as configured, and what their names resolve to, for life."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import grpc

from catenary.rpc import NamedAddresses, resolve
from gateway.link.router_session import RouterSession

Dial = Callable[[str, str], grpc.aio.Channel]


@dataclass(slots=True)
class _Target:
    session: RouterSession
    channel: grpc.aio.Channel
    task: asyncio.Task[None]


class RouterTargets:
    """One session for each address. A name is looked up again and again; an address that it does not stand
    for any more is dropped once its session is down."""

    def __init__(
        self,
        addresses: Sequence[str],
        dial: Dial,
        open_session: Callable[[str, grpc.aio.Channel], RouterSession],
        *,
        look_up: Callable[[str], Awaitable[Sequence[str]]] = resolve,
    ) -> None:
        """`dial(address, name)` makes a channel. Raises ValueError for what is not an address."""
        self._addresses = NamedAddresses(addresses, look_up)
        self._dial = dial
        self._open_session = open_session
        self._targets: dict[str, _Target] = {}
        self._channels: set[grpc.aio.Channel] = set()

    @property
    def sessions(self) -> list[RouterSession]:
        """All of them, connected or not."""
        return [target.session for target in self._targets.values()]

    async def run(self) -> None:
        """Keep a session to each router until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for address in self._addresses.literal:
                self._add(tasks, address, address)
            while self._addresses.names:
                await self._look_up(tasks)
                connected = any(session.connected for session in self.sessions)
                await asyncio.sleep(self._addresses.pause_s(connected=connected))

    async def close(self) -> None:
        """Close all channels, once `run` has ended."""
        for channel in list(self._channels):
            await channel.close()

    async def _look_up(self, tasks: asyncio.TaskGroup) -> None:
        known = {address: target.session.connected for address, target in self._targets.items()}
        wanted = await self._addresses.wanted(known)
        for address, name in wanted.items():
            if address not in self._targets:
                self._add(tasks, address, name)
        for address, target in list(self._targets.items()):
            if address not in wanted and not target.session.connected:
                await self._drop(address, target)

    def _add(self, tasks: asyncio.TaskGroup, address: str, name: str) -> None:
        channel = self._dial(address, name)
        self._channels.add(channel)
        session = self._open_session(address, channel)
        task = tasks.create_task(session.run(), name=f"router-session {address}")
        self._targets[address] = _Target(session, channel, task)

    async def _drop(self, address: str, target: _Target) -> None:
        del self._targets[address]
        target.task.cancel()
        await asyncio.wait({target.task})
        self._channels.discard(target.channel)
        await target.channel.close()
