"""Links to the routers: dialling, retries, and one link for each address of a router's name."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import grpc

from catenary.backoff import Backoff
from catenary.rpc import NamedAddresses, resolve
from catenary.telemetry import get_logger
from services.engine.servicer.attachment import (
    AttachLost,
    Attachment,
    AttachRefused,
    DrainOrder,
    KvPublishing,
)
from services.engine.servicer.contract import Identity
from services.engine.servicer.frontend import EngineFrontend
from services.engine.servicer.routers import RouterOutbox

log = get_logger(__name__)


# Answers that wait for a router that does not read. Each is small, and beyond them no command of that router
# is read, so that one that hangs costs an engine no memory. A router that works reads them at once.
_MAX_ANSWERS = 1024
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """Time limits of a link, in seconds."""

    attach_timeout_s: float
    orphan_timeout_s: float
    backoff_s: float
    backoff_max_s: float
    refused_backoff_s: float


class RouterLink:
    """The link to the router at one address. `dial` makes a channel that carries the engine's secret.

    `attached_elsewhere` tells whether another link has a lease of the router with this instance id: a router
    behind two addresses knows one attachment of an engine, and each would end the other for ever.
    """

    def __init__(
        self,
        address: str,
        dial: Callable[[str], grpc.aio.Channel],
        identity: Identity,
        frontend: EngineFrontend,
        drain_order: DrainOrder,
        times: LinkTimes,
        attached_elsewhere: Callable[[str], bool],
        publishing: KvPublishing,
    ) -> None:
        self._address = address
        self._dial = dial
        self._identity = identity
        self._frontend = frontend
        self._drain_order = drain_order
        self._times = times
        self._attached_elsewhere = attached_elsewhere
        self._router: str | None = None
        self._publishing = publishing
        self._backoff = Backoff(times.backoff_s, times.backoff_max_s)
        self._said: str | None = None
        self._attachment: Attachment | None = None

    @property
    def attached(self) -> bool:
        """Whether a router has granted a lease here and still keeps it."""
        return self._attachment is not None and self._attachment.attached

    @property
    def router(self) -> str | None:
        """Instance id of the router that is or was attached to."""
        attached = None if self._attachment is None else self._attachment.router
        return attached or self._router

    async def run(self) -> None:
        """Attach again and again until the engine drains. The hello needs the core's facts first."""
        await self._frontend.facts.wait()
        while not self._frontend.draining:
            if self._router is not None and self._attached_elsewhere(self._router):
                await asyncio.sleep(self._times.backoff_max_s)
                continue
            delay = await self._attach_once()
            await asyncio.sleep(delay)

    async def _attach_once(self) -> float:
        """Attach once. Return the seconds to wait before the next attempt."""
        channel = self._dial(self._address)
        attachment = Attachment(
            channel,
            self._identity,
            self._frontend,
            RouterOutbox(next(_numbers), max_answers=_MAX_ANSWERS),
            self._drain_order,
            self._publishing,
            attach_timeout_s=self._times.attach_timeout_s,
            orphan_timeout_s=self._times.orphan_timeout_s,
        )
        self._attachment = attachment
        started = time.monotonic()
        try:
            await attachment.run()
        except AttachRefused as exc:
            self._frontend.router_refusal = f"the router at {self._address} refused the engine: {exc}"
            self._say("the router refused this engine", str(exc), wait_s=self._times.refused_backoff_s)
            return self._times.refused_backoff_s
        except AttachLost as exc:
            if self._frontend.draining:
                log.info("left the router", address=self._address, reason=str(exc))
                return 0.0
            # A router that takes the engine and drops it at once must not be dialled in a tight loop.
            if time.monotonic() - started > self._times.backoff_max_s:
                self._backoff.reset()
                self._said = None
            delay = self._backoff.next_delay()
            self._say("no router" if not attachment.attached else "lost the router", str(exc), wait_s=delay)
            return delay
        except Exception:
            # One router's link must not take down an engine that serves others.
            log.exception("the link to a router failed", address=self._address)
            return self._times.backoff_max_s
        finally:
            self._router = self.router
            self._attachment = None
            await channel.close()

    def _say(self, event: str, reason: str, *, wait_s: float) -> None:
        """Log a failure; the same one again and again only for debugging."""
        level = log.debug if self._said == reason else log.warning
        self._said = reason
        level(event, address=self._address, reason=reason, retry_in_s=round(wait_s, 3))


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
        frontend: EngineFrontend,
        *,
        look_up: Callable[[str], Awaitable[Sequence[str]]] = resolve,
    ) -> None:
        """Raise ValueError for a text that is no address."""
        self._addresses = NamedAddresses(addresses, look_up)
        self._make = make
        self._frontend = frontend
        self._targets: dict[str, _Target] = {}

    def __len__(self) -> int:
        """Number of addresses that are dialled."""
        return len(self._targets)

    async def run(self) -> None:
        """Keep the links until the engine drains; those that are attached end by themselves then."""
        async with asyncio.TaskGroup() as tasks:
            for address in self._addresses.literal:
                self._add(tasks, address, address)
            while self._addresses.names and not self._frontend.draining:
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
