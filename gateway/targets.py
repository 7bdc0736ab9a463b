"""Services behind a list of addresses: one target for each, with names looked up again and again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, Protocol, TypeVar

import grpc

from catenary.rpc import NamedAddresses, resolve

Dial = Callable[[str, str], grpc.aio.Channel]
"""Maker of a channel to an address, which the second argument, a name or the address itself, resolved to."""
LookUp = Callable[[str], Awaitable[Sequence[str]]]


class Target(Protocol):
    """Service at one address."""

    @property
    def live(self) -> int:
        """Number of calls, or sequences, that would end with the channel."""

    async def run(self) -> None:
        """Keep in touch with the service until cancelled."""

    async def close(self) -> None:
        """Close the channel, once `run` has ended."""


T = TypeVar("T", bound=Target)


class Targets(Generic[T]):
    """Targets, one for each address. Names are looked up periodically: a target whose address its name has
    lost is dropped once it does not answer, and closed once no calls are under way."""

    def __init__(
        self,
        addresses: Sequence[str],
        make: Callable[[str, str], T],
        answers: Callable[[T], bool],
        look_up: LookUp = resolve,
    ) -> None:
        """Make the targets of literal addresses. Raise ValueError for an invalid address.

        Args:
            addresses: of services; a name may stand for several.
            make: makes a target of an address and the name, or address, that resolved to it.
            answers: whether a target is connected; it is kept then.
            look_up: returns the addresses of a name.
        """
        self._addresses = NamedAddresses(addresses, look_up)
        self._make = make
        self._answers = answers
        self._known: dict[str, T] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._dropped: list[T] = []
        self.all: list[T] = []
        """Targets in use, in an order that their user may change."""
        for address in self._addresses.literal:
            self._add(address, address)

    async def run(self) -> None:
        """Run all targets, and look names up, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for address in self._known:
                self._start(tasks, address)
            while self._addresses.names:
                await self._look_up(tasks)
                connected = any(map(self._answers, self.all))
                await asyncio.sleep(self._addresses.pause_s(connected=connected))

    async def close(self) -> None:
        for target in (*self._known.values(), *self._dropped):
            await target.close()

    async def _look_up(self, tasks: asyncio.TaskGroup) -> None:
        known = {address: self._answers(target) for address, target in self._known.items()}
        wanted = await self._addresses.wanted(known)
        for address, name in wanted.items():
            if address not in self._known:
                self._add(address, name)
                self._start(tasks, address)
        for address, target in list(self._known.items()):
            if address not in wanted and not self._answers(target):
                await self._drop(address, target)
        for target in [target for target in self._dropped if not target.live]:
            self._dropped.remove(target)
            await target.close()

    def _add(self, address: str, name: str) -> None:
        target = self._known[address] = self._make(address, name)
        self.all.append(target)

    def _start(self, tasks: asyncio.TaskGroup, address: str) -> None:
        self._tasks[address] = tasks.create_task(self._known[address].run(), name=f"target {address}")

    async def _drop(self, address: str, target: T) -> None:
        del self._known[address]
        self.all.remove(target)
        self._dropped.append(target)
        task = self._tasks.pop(address)
        task.cancel()
        await asyncio.wait({task})
