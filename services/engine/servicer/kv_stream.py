"""The PublishKv stream beside an attachment. Whatever becomes of it, the attachment goes on."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import NoReturn

import grpc

from catenary.backoff import Backoff
from catenary.telemetry import get_logger
from catenary.v1 import engine_pb2, engine_pb2_grpc
from services.engine.servicer.hub import EngineHub
from services.engine.servicer.kv_events import KvOutbox
from services.engine.servicer.refusals import LINK_REFUSALS

log = get_logger(__name__)


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
    """Follows the hub's board for one router."""

    def __init__(
        self,
        stub: engine_pb2_grpc.FleetServiceAsyncStub,
        instance_id: str,
        hub: EngineHub,
        terms: KvPublishing,
    ) -> None:
        self._stub = stub
        self._instance_id = instance_id
        self._hub = hub
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
        """One stream; how long to wait before the next."""
        ready = self._hub.ready
        if ready is None:
            return self._backoff.next_delay()
        call = self._stub.PublishKv()
        outbox = self._hub.kv.join(max_pending=self._terms.max_pending)
        hello = engine_pb2.KvHello(
            instance_id=self._instance_id, lease_epoch=epoch, block_size=ready.capacity.block_size
        )
        # Not a task group: one that is cancelled while a task of it fails forgets the cancellation.
        tasks = (
            asyncio.create_task(self._write(call, hello, outbox)),
            asyncio.create_task(self._read(call, outbox)),
        )
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._hub.kv.leave(outbox)
            call.cancel()
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
        for end in ends:
            if not isinstance(end, grpc.RpcError | asyncio.InvalidStateError | asyncio.CancelledError | None):
                log.error("the stream of KV events failed", epoch=epoch, exc_info=end)
        code = await call.code()
        refused = code in LINK_REFUSALS
        delay = self._terms.refused_backoff_s if refused else self._backoff.next_delay()
        level = log.warning if refused else log.info
        level("KV events are not followed", epoch=epoch, reason=code.name, retry_in_s=round(delay, 3))
        return delay

    async def _write(self, call: _Call, hello: engine_pb2.KvHello, outbox: KvOutbox) -> None:
        await call.write(engine_pb2.PublishKvRequest(hello=hello))
        while True:
            await outbox.ready()
            for message in outbox.take():
                await call.write(message)
            # What comes meanwhile goes into one message.
            await asyncio.sleep(self._terms.interval_s)

    async def _read(self, call: _Call, outbox: KvOutbox) -> None:
        while isinstance(message := await call.read(), engine_pb2.PublishKvResponse):
            if message.WhichOneof("payload") == "resync":
                outbox.renew()
                # A router that asks again and again is answered in its turn.
                await asyncio.sleep(self._terms.resync_interval_s)
        raise asyncio.InvalidStateError("the router ended the stream")


_Call = grpc.aio.StreamStreamCall[engine_pb2.PublishKvRequest, engine_pb2.PublishKvResponse]
