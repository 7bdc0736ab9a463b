"""One attachment to a router: its two streams (Attach, PublishKv), its lease, and the order to drain."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import grpc

from catenary.backoff import Backoff
from catenary.schema import MINIMUM_PEER_REVISION, revision_mismatch
from catenary.telemetry import get_logger
from catenary.v1 import engine_pb2, engine_pb2_grpc
from services.engine.servicer.contract import Identity
from services.engine.servicer.frontend import EngineFrontend
from services.engine.servicer.prefix_cache import PrefixCacheDelta
from services.engine.servicer.routers import LOAD_DUE, RouterOutbox

log = get_logger(__name__)


class DrainOrder:
    """Given by any router, or by several: the earliest deadline counts. Times are of a steady clock."""

    def __init__(self, default_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._default_s = default_s
        self._clock = clock
        self._until: float | None = None
        self._changed = asyncio.Event()

    def give(self, deadline_s: float | None) -> None:
        """Finish within so many seconds; None: the engine's own time."""
        until = self._clock() + (self._default_s if deadline_s is None else deadline_s)
        if self._until is None or until < self._until:
            self._until = until
            self._changed.set()

    async def given(self) -> None:
        """Wait for an order."""
        await self._changed.wait()

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, 0 if it is over. Without an order, the engine's own time."""
        return self._default_s if self._until is None else max(0.0, self._until - self._clock())

    async def over(self) -> None:
        """Wait until the deadline has passed. It may come nearer meanwhile."""
        while (left := self.left_s) > 0:
            self._changed.clear()
            try:
                async with asyncio.timeout(left):
                    await self._changed.wait()
            except TimeoutError:
                return


# The lease is the router's option (--lease-ms); a shorter one would run out in any pause of a process.
_SHORTEST_LEASE_MS = 50


class LeaseRefused(Exception):
    """The router's answer makes no lease; the text says why."""


class Lease:
    """An epoch and the time of the last word from its router. Times are seconds of any steady clock."""

    def __init__(self, attached: engine_pb2.Attached, *, now: float, orphan_timeout_s: float) -> None:
        """Raise LeaseRefused if the schema revisions do not fit or the terms cannot be kept."""
        if attached.schema_revision < MINIMUM_PEER_REVISION:
            mismatch = revision_mismatch(attached.schema_revision, 0, peer="router")
            raise LeaseRefused(mismatch or "the router's schema revision is unknown")
        if attached.lease_epoch == 0:
            raise LeaseRefused("the router granted no lease epoch")
        if attached.lease_ms < _SHORTEST_LEASE_MS or not 0 < attached.report_interval_ms < attached.lease_ms:
            raise LeaseRefused(
                f"the router wants a report each {attached.report_interval_ms} ms in a lease of "
                f"{attached.lease_ms} ms; that cannot be kept"
            )
        self.epoch = attached.lease_epoch
        self.router = attached.router_instance_id
        self.interval_s = attached.report_interval_ms / 1000
        self.limit_s = min(attached.lease_ms / 1000, orphan_timeout_s)
        self._heard = now

    def heard(self, now: float) -> None:
        """Note that a message of the router came at `now`."""
        self._heard = now

    def left_s(self, now: float) -> float:
        """Return the seconds until the lease runs out; 0 or less: it has."""
        return self._heard + self.limit_s - now


_GOODBYE_S = 1.0

# Statuses of a router that does not want this engine as it is: dialling again at once is of no use.
_REFUSALS = frozenset(
    {
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)


@dataclass(frozen=True, slots=True)
class KvPublishing:
    """How the names of cached blocks are told. `max_pending`: names that may wait for a router that does not
    read. Times in seconds: between two messages, between two snapshots, before a lost stream is opened again,
    at the most, and when the router refused it."""

    interval_s: float
    max_pending: int
    resync_interval_s: float
    backoff_s: float
    backoff_max_s: float
    refused_backoff_s: float


class KvStream:
    """Follows the frontend's mirror for one router."""

    def __init__(
        self,
        stub: engine_pb2_grpc.FleetServiceAsyncStub,
        instance_id: str,
        frontend: EngineFrontend,
        terms: KvPublishing,
    ) -> None:
        self._stub = stub
        self._instance_id = instance_id
        self._frontend = frontend
        self._terms = terms
        self._backoff = Backoff(terms.backoff_s, terms.backoff_max_s)

    async def run(self, epoch: int) -> NoReturn:
        """Publish under this lease until cancelled, over one stream after the other."""
        while True:
            opened = time.monotonic()
            delay = await self._publish(epoch)
            if time.monotonic() - opened > self._terms.backoff_max_s:
                self._backoff.reset()
            await asyncio.sleep(delay)

    async def _publish(self, epoch: int) -> float:
        """Publish over one stream to its end. Return the seconds to wait before the next."""
        ready = self._frontend.ready
        if ready is None:
            return self._backoff.next_delay()
        call = self._stub.PublishKv()
        delta = self._frontend.prefix_cache.join(max_pending=self._terms.max_pending)
        hello = engine_pb2.KvHello(
            instance_id=self._instance_id, lease_epoch=epoch, block_size=ready.capacity.block_size
        )
        # Not a task group: one that is cancelled while a task of it fails forgets the cancellation.
        tasks = (
            asyncio.create_task(self._write(call, hello, delta)),
            asyncio.create_task(self._read(call, delta)),
        )
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._frontend.prefix_cache.leave(delta)
            call.cancel()
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
        for end in ends:
            if not isinstance(end, grpc.RpcError | asyncio.InvalidStateError | asyncio.CancelledError | None):
                log.error("the stream of KV events failed", epoch=epoch, exc_info=end)
        code = await call.code()
        refused = code in _REFUSALS
        delay = self._terms.refused_backoff_s if refused else self._backoff.next_delay()
        level = log.warning if refused else log.info
        level("KV events are not followed", epoch=epoch, reason=code.name, retry_in_s=round(delay, 3))
        return delay

    async def _write(self, call: _KvCall, hello: engine_pb2.KvHello, delta: PrefixCacheDelta) -> None:
        await call.write(engine_pb2.PublishKvRequest(hello=hello))
        while True:
            await delta.ready()
            for message in delta.take():
                await call.write(message)
            # Changes of this time go into one message.
            await asyncio.sleep(self._terms.interval_s)

    async def _read(self, call: _KvCall, delta: PrefixCacheDelta) -> None:
        while isinstance(message := await call.read(), engine_pb2.PublishKvResponse):
            if message.WhichOneof("payload") == "resync":
                delta.renew()
                # A router that asks again and again is answered in its turn.
                await asyncio.sleep(self._terms.resync_interval_s)
        raise asyncio.InvalidStateError("the router ended the stream")


class AttachLost(Exception):
    """The router cannot be reached, or the stream ended; dial again."""


class AttachRefused(Exception):
    """The router does not want this engine as it is; the text is the router's."""


class Attachment:
    """A stream with its lease, tasks (read, write, report; publish KV events) and one outbox."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        identity: Identity,
        frontend: EngineFrontend,
        outbox: RouterOutbox,
        drain_order: DrainOrder,
        publishing: KvPublishing,
        *,
        attach_timeout_s: float,
        orphan_timeout_s: float,
    ) -> None:
        self._stub = engine_pb2_grpc.FleetServiceStub(channel)
        self._identity = identity
        self._frontend = frontend
        self._outbox = outbox
        self._drain_order = drain_order
        self._kv = KvStream(self._stub, identity.instance_id, frontend, publishing)
        self._attach_timeout_s = attach_timeout_s
        self._orphan_timeout_s = orphan_timeout_s
        self._reports = 0
        # The first report that says that nothing new is taken.
        self._drain_report: int | None = None
        self.attached = False
        # Instance id of the router, once it granted a lease.
        self.router: str | None = None

    async def run(self) -> NoReturn:
        """Attach and serve until the stream or the lease ends.

        Raises AttachRefused before a lease was granted, AttachLost in every other case. The router's
        sequences are aborted in the core by then.
        """
        call = self._stub.Attach()
        try:
            lease = await self._open(call)
            self.attached, self.router = True, lease.router
            self._frontend.routers.join(self._outbox, lease.router)
            self._frontend.router_refusal = ""
            log.info("attached to a router", router=lease.router, epoch=lease.epoch, lease_s=lease.limit_s)
            await self._serve(call, lease)
        finally:
            self._frontend.leave(self._outbox)
            call.cancel()

    async def _open(self, call: _Call) -> Lease:
        ready = self._frontend.ready
        if ready is None:
            raise AttachLost("the core was never ready")
        try:
            async with asyncio.timeout(self._attach_timeout_s):
                await call.write(
                    engine_pb2.AttachRequest(hello=self._identity.hello(ready, self._frontend.state))
                )
                answer = await call.read()
        except TimeoutError:
            raise AttachLost(f"no answer within {self._attach_timeout_s:g} s") from None
        except (grpc.RpcError, asyncio.InvalidStateError):
            raise await self._why(call) from None
        if not isinstance(answer, engine_pb2.AttachResponse):
            raise await self._why(call)
        if answer.WhichOneof("payload") != "attached":
            raise AttachRefused("the router's first message is not `attached`")
        try:
            return Lease(answer.attached, now=time.monotonic(), orphan_timeout_s=self._orphan_timeout_s)
        except LeaseRefused as exc:
            raise AttachRefused(str(exc)) from None

    async def _serve(self, call: _Call, lease: Lease) -> NoReturn:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._read(call, lease))
                group.create_task(self._write(call, lease))
                group.create_task(self._report(lease))
                if self._frontend.ready is not None and self._identity.publishes_kv(self._frontend.ready):
                    group.create_task(self._kv.run(lease.epoch))
        except* AttachLost as lost:
            reason = str(lost.exceptions[0])
        except* (grpc.RpcError, asyncio.InvalidStateError):
            reason = str(await self._why(call))
        raise AttachLost(reason)

    async def _read(self, call: _Call, lease: Lease) -> None:
        while True:
            await self._outbox.room()
            message = await call.read()
            if not isinstance(message, engine_pb2.AttachResponse):
                raise AttachLost("the router ended the stream")
            now = time.monotonic()
            # After a long stop of this process a queued message must not revive what the router has given up.
            if lease.left_s(now) <= 0:
                raise _expired(lease)
            lease.heard(now)
            match message.WhichOneof("payload"):
                case "submit":
                    self._frontend.submit(self._outbox, message.submit)
                case "abort":
                    self._frontend.abort(self._outbox, message.abort.handle)
                case "drain":
                    order = message.drain
                    log.info("told to drain", router=lease.router)
                    self._drain_order.give(
                        order.deadline_ms / 1000 if order.HasField("deadline_ms") else None
                    )
                case "renewed":
                    if self._drain_report is not None and message.renewed.sequence >= self._drain_report:
                        self._frontend.routers.knows_of_drain(self._outbox)
                case "keep":
                    self._frontend.routers.reserve(self._outbox, wanted=message.keep.wanted)
                case _:
                    pass

    async def _write(self, call: _Call, lease: Lease) -> None:
        while True:
            await self._outbox.ready()
            for message in self._outbox.take():
                sent = engine_pb2.AttachRequest(load=self._load()) if message is LOAD_DUE else message
                sent.lease_epoch = lease.epoch
                await call.write(sent)
            if self._outbox.closed and self._outbox.empty:
                await call.done_writing()
                await asyncio.wait([asyncio.ensure_future(call.code())], timeout=_GOODBYE_S)
                raise AttachLost(self._outbox.closing)

    async def _report(self, lease: Lease) -> None:
        while (left := lease.left_s(time.monotonic())) > 0:
            self._outbox.request_load()
            await asyncio.sleep(min(lease.interval_s, left))
        raise _expired(lease)

    def _load(self) -> engine_pb2.LoadReport:
        self._reports += 1
        # No router hears of a state before the health service says it too.
        self._frontend.refresh()
        report = self._frontend.load()
        report.sequence = self._reports
        if report.state == engine_pb2.ENGINE_STATE_DRAINING and self._drain_report is None:
            self._drain_report = self._reports
        report.kept = self._frontend.routers.reserved_from(self._outbox.link)
        return report

    async def _why(self, call: _Call) -> AttachLost | AttachRefused:
        code = await call.code()
        reason = f"{code.name}: {await call.details() or 'no details'}"
        return AttachRefused(reason) if code in _REFUSALS and not self.attached else AttachLost(reason)


def _expired(lease: Lease) -> AttachLost:
    return AttachLost(f"the router was silent for {lease.limit_s:g} s")


_Call = grpc.aio.StreamStreamCall[engine_pb2.AttachRequest, engine_pb2.AttachResponse]
_KvCall = grpc.aio.StreamStreamCall[engine_pb2.PublishKvRequest, engine_pb2.PublishKvResponse]
