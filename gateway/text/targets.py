"""The tokenizer services there are: addresses as configured, and what their names resolve to, for life."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import grpc

from catenary.rpc import NamedAddresses, resolve
from gateway.text.target import TokenizerTarget

Dial = Callable[[str, str], grpc.aio.Channel]
_DNS = "dns:///"


class TokenizerTargets:
    """One target for each address. A name is looked up again and again; an address that it does not stand for
    any more is dropped once it does not answer."""

    def __init__(
        self,
        addresses: Sequence[str],
        dial: Dial,
        *,
        silence_s: float,
        max_message_mib: int,
        look_up: Callable[[str], Awaitable[Sequence[str]]] = resolve,
    ) -> None:
        """`dial(address, name)` makes a channel; `silence_s`, `max_message_mib`: see TokenizerTarget. A name
        may have `dns:///` in front of it. Raises ValueError for what is not an address."""
        self._addresses = NamedAddresses([address.removeprefix(_DNS) for address in addresses], look_up)
        self._dial = dial
        self._silence_s = silence_s
        self._max_message_mib = max_message_mib
        self._known: dict[str, TokenizerTarget] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._dropped: list[TokenizerTarget] = []
        self.on_change: Callable[[], None] = lambda: None
        """Called when one begins to answer, or does not."""
        self.all: list[TokenizerTarget] = []
        """Those that are known now, in an order that is the owner's to change."""
        for address in self._addresses.literal:
            self._add(address, address)

    async def run(self) -> None:
        """Watch them until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for address in list(self._known):
                self._watch(tasks, address)
            while self._addresses.names:
                await self._look_up(tasks)
                answering = any(target.answering for target in self.all)
                await asyncio.sleep(self._addresses.pause_s(connected=answering))

    async def close(self) -> None:
        """Close all channels, once `run` has ended."""
        for target in (*self._known.values(), *self._dropped):
            await target.close()

    async def _look_up(self, tasks: asyncio.TaskGroup) -> None:
        wanted = await self._addresses.wanted(
            {address: target.answering for address, target in self._known.items()}
        )
        for address, name in wanted.items():
            if address not in self._known:
                self._add(address, name)
                self._watch(tasks, address)
        for address, target in list(self._known.items()):
            if address not in wanted and not target.answering:
                await self._drop(address, target)
        await self._close_dropped()

    def _add(self, address: str, name: str) -> None:
        channel = self._dial(address, name)
        target = TokenizerTarget(
            address,
            channel,
            silence_s=self._silence_s,
            max_message_mib=self._max_message_mib,
            on_change=lambda: self.on_change(),
        )
        self._known[address] = target
        self.all.append(target)

    def _watch(self, tasks: asyncio.TaskGroup, address: str) -> None:
        watch = self._known[address].watch()
        self._watches[address] = tasks.create_task(watch, name=f"tokenizer {address}")

    async def _drop(self, address: str, target: TokenizerTarget) -> None:
        del self._known[address]
        self.all.remove(target)
        self._dropped.append(target)
        watch = self._watches.pop(address)
        watch.cancel()
        await asyncio.wait({watch})
        await target.drop()

    async def _close_dropped(self) -> None:
        for target in [target for target in self._dropped if not target.calls]:
            await target.close()
            self._dropped.remove(target)
