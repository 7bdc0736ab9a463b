"""FleetService, the engines' side of the router: Attach and PublishKv streams.

A failure of a PublishKv stream, which tells of an engine's prefix cache, harms no sequence.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import grpc

from catenary.columns import MalformedStep
from catenary.outbox import Messages, Outbox
from catenary.rpc import RpcError
from catenary.schema import SCHEMA_REVISION
from catenary.telemetry import get_logger
from catenary.v1 import common_pb2, engine_pb2, engine_pb2_grpc
from services.router.admission import Refused
from services.router.dispatch import EngineLink, LossReason, Membership
from services.router.fleet import Engine, Fleet
from services.router.index import KvFeed, KvIndex, MalformedKv
from services.router.metrics import RouterMetrics
from services.router.service.streams import INTERNAL, ReaderWatch, first_message, serve_stream

# Changes of one message; further ones go into the next.
MAX_CHANGES = 1024
# Bytes of one message: names and their envelope.
MAX_BYTES = (1 << 20) + (1 << 16)


class KvPublication:
    """One PublishKv stream, which never waits for the engine.

    The index knows of the engine what the stream has told, and nothing once it is closed.
    """

    def __init__(self, engine: Engine, index: KvIndex[Engine], *, max_resyncs: int) -> None:
        self.engine = engine
        self.error: common_pb2.Error | None = None
        self.resyncs = 0
        self._index = index
        self._feed = KvFeed(index, engine)
        self._max_resyncs = max_resyncs
        self._asked: Messages[engine_pb2.PublishKvResponse] = Messages()
        self._outbox = Outbox(self._asked)

    def receive(self, request: engine_pb2.PublishKvRequest) -> None:
        """Handle a message after the hello.

        Raises:
            Refused: it breaks the contract, names more blocks than the engine has, or was one gap too many.
        """
        if self._outbox.closed:
            return
        changes = len(request.changes.changes)
        if changes > MAX_CHANGES or request.ByteSize() > MAX_BYTES:
            raise _refusal(f"A message has at most {MAX_CHANGES} changes and {MAX_BYTES} bytes.")
        try:
            gap = self._take(request)
        except MalformedKv as fault:
            raise _refusal(f"The message is malformed: {fault}.") from None
        total = self.engine.capacity.total_blocks
        if self._index.blocks(self.engine) > total:
            raise _refusal(f"The engine names more blocks than the {total} that it has.")
        if gap:
            self._ask()

    def close(self, error: common_pb2.Error | None = None) -> None:
        """End the stream; with `error`, as a refusal. The first close decides."""
        if self._outbox.closed:
            return
        self.error = error
        self._feed.close()
        self._outbox.close()

    async def messages(self) -> AsyncIterator[engine_pb2.PublishKvResponse]:
        """Yield the messages to write until the publication is closed."""
        while (message := await self._outbox.next()) is not None:
            yield message

    def _take(self, request: engine_pb2.PublishKvRequest) -> bool:
        match request.WhichOneof("payload"):
            case "snapshot":
                return self._feed.snapshot(request.snapshot)
            case "changes":
                return self._feed.changes(request.changes)
            case _:
                raise MalformedKv("only the first message of a stream is a hello")

    def _ask(self) -> None:
        self.resyncs += 1
        if self.resyncs > self._max_resyncs:
            raise _refusal(f"There were more than {self._max_resyncs} gaps (max-kv-resyncs).")
        resync = engine_pb2.KvResync(last_number=self._feed.last_number)
        self._outbox.put(self._asked, engine_pb2.PublishKvResponse(resync=resync), "resync")


def _refusal(message: str) -> Refused:
    return Refused(common_pb2.ERROR_CODE_INVALID_ARGUMENT, message)


_log = get_logger(__name__)

_REPLACED = common_pb2.Error(
    code=common_pb2.ERROR_CODE_UNAVAILABLE,
    message="The engine opened another stream of KV events; this one is over.",
    retryable=True,
)


class KvStreams:
    """Carries PublishKv streams into the index, at most one for each attached engine.

    `link_of` gives an engine's attachment. A stream ends with it.
    """

    def __init__(
        self,
        fleet: Fleet,
        link_of: Callable[[Engine], EngineLink | None],
        index: KvIndex[Engine],
        metrics: RouterMetrics,
        *,
        hello_timeout_s: float,
        max_resyncs: int,
    ) -> None:
        self._fleet = fleet
        self._link_of = link_of
        self._index = index
        self._metrics = metrics
        self._hello_timeout_s = hello_timeout_s
        self._max_resyncs = max_resyncs
        self._open: dict[Engine, KvPublication] = {}

    async def serve(
        self, requests: AsyncIterator[engine_pb2.PublishKvRequest]
    ) -> AsyncIterator[engine_pb2.PublishKvResponse]:
        """Serve one stream. Raises RpcError for a hello that is refused and for a breach of the contract."""
        first = await first_message(requests, "hello", timeout_s=self._hello_timeout_s)
        try:
            link = self._check(first.hello)
        except Refused as refusal:
            _log.warning("KV events refused", reason=refusal.error.message)
            raise RpcError(refusal.error) from None
        publication = self._begin(link.engine)
        tasks = (
            asyncio.create_task(self._read(requests, publication)),
            asyncio.create_task(_close_with(link, publication)),
        )
        try:
            async for message in publication.messages():
                yield message
            if publication.error is not None:
                raise RpcError(publication.error)
        finally:
            for task in tasks:
                task.cancel()
            publication.close()
            if self._open.get(link.engine) is publication:
                del self._open[link.engine]

    def _check(self, hello: engine_pb2.KvHello) -> EngineLink:
        engine = self._fleet.find(hello.instance_id)
        link = None if engine is None else self._link_of(engine)
        if engine is None or link is None or engine.epoch != hello.lease_epoch:
            raise Refused(
                common_pb2.ERROR_CODE_SCHEMA_MISMATCH,
                f"No attachment of this engine has the lease epoch {hello.lease_epoch}.",
            )
        if hello.block_size != engine.capacity.block_size:
            raise Refused(
                common_pb2.ERROR_CODE_INVALID_ARGUMENT,
                f"The blocks have {hello.block_size} tokens, those of the attachment "
                f"{engine.capacity.block_size}.",
                param="block_size",
            )
        return link

    def _begin(self, engine: Engine) -> KvPublication:
        older = self._open.pop(engine, None)
        if older is not None:
            # Before the new one begins, as it clears the index of the engine.
            older.close(_REPLACED)
        publication = KvPublication(engine, self._index, max_resyncs=self._max_resyncs)
        self._open[engine] = publication
        return publication

    async def _read(
        self, requests: AsyncIterator[engine_pb2.PublishKvRequest], publication: KvPublication
    ) -> None:
        engine = publication.engine
        try:
            async for request in requests:
                gaps = publication.resyncs
                publication.receive(request)
                if publication.resyncs > gaps:
                    self._metrics.kv_resyncs.inc()
                    _log.warning("a gap in KV events", engine=engine.name, instance=engine.instance_id)
            publication.close()
        except Refused as refusal:
            self._metrics.kv_breaches.inc()
            _log.error("engine broke the contract of KV events", engine=engine.name, fault=str(refusal))
            publication.close(refusal.error)
        except (grpc.aio.InternalError, grpc.aio.UsageError):
            publication.close()
        except Exception:
            _log.exception("KV events failed", engine=engine.name)
            publication.close(INTERNAL)


async def _close_with(link: EngineLink, publication: KvPublication) -> None:
    await link.ended()
    publication.close(link.error)


@dataclass(frozen=True, slots=True)
class AttachTerms:
    """The terms of an attachment. Times in milliseconds."""

    router_instance_id: str
    lease_ms: int
    report_interval_ms: int
    hello_timeout_s: float


class _AttachStream:
    """The stream of one attachment; see AcceptedStream."""

    def __init__(
        self,
        membership: Membership,
        link: EngineLink,
        requests: AsyncIterator[engine_pb2.AttachRequest],
        terms: AttachTerms,
    ) -> None:
        self._membership = membership
        self._link = link
        self._requests = requests
        self._terms = terms

    @property
    def error(self) -> common_pb2.Error | None:
        return self._link.error

    def welcome(self) -> engine_pb2.AttachResponse:
        attached = engine_pb2.Attached(
            schema_revision=SCHEMA_REVISION,
            router_instance_id=self._terms.router_instance_id,
            lease_epoch=self._link.engine.epoch,
            lease_ms=self._terms.lease_ms,
            report_interval_ms=self._terms.report_interval_ms,
        )
        return engine_pb2.AttachResponse(attached=attached)

    def messages(self) -> AsyncIterator[engine_pb2.AttachResponse]:
        return self._link.messages()

    async def read(self) -> None:
        membership, link = self._membership, self._link
        try:
            async for request in self._requests:
                membership.receive(link, request)
            membership.leave(link, LossReason.STREAM_ENDED)
        except (Refused, RpcError) as refusal:
            membership.leave(link, LossReason.PROTOCOL, refusal.error)
        except MalformedStep as fault:
            _log.error("engine broke the contract", engine=link.engine.name, fault=str(fault))
            text = f"The step is malformed: {fault}."
            error = common_pb2.Error(code=common_pb2.ERROR_CODE_INVALID_ARGUMENT, message=text)
            membership.leave(link, LossReason.PROTOCOL, error)
        except (grpc.aio.InternalError, grpc.aio.UsageError):
            membership.leave(link, LossReason.STREAM_ENDED)
        except Exception:
            _log.exception("engine message failed", engine=link.engine.name)
            membership.leave(link, LossReason.PROTOCOL, INTERNAL)

    def stalled(self) -> None:
        self._membership.leave(self._link, LossReason.NOT_READING)

    def close(self) -> None:
        self._membership.leave(self._link, LossReason.STREAM_ENDED)


class FleetServicer(engine_pb2_grpc.FleetServiceServicer):
    """Serves Attach streams by `membership`, and PublishKv streams by `kv`."""

    def __init__(self, membership: Membership, watch: ReaderWatch, terms: AttachTerms, kv: KvStreams) -> None:
        self._membership = membership
        self._kv = kv
        self._watch = watch
        self._terms = terms

    def Attach(
        self,
        request_iterator: AsyncIterator[engine_pb2.AttachRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[engine_pb2.AttachResponse]:
        """See the proto."""
        return serve_stream(lambda: self._accept(request_iterator), self._watch)

    def PublishKv(
        self,
        request_iterator: AsyncIterator[engine_pb2.PublishKvRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[engine_pb2.PublishKvResponse]:
        """See the proto."""
        return self._kv.serve(request_iterator)

    async def _accept(self, requests: AsyncIterator[engine_pb2.AttachRequest]) -> _AttachStream:
        first = await first_message(requests, "hello", timeout_s=self._terms.hello_timeout_s)
        try:
            link = self._membership.attach(first.hello)
        except Refused as refusal:
            _log.warning("engine refused", engine=first.hello.engine_name[:64], reason=refusal.error.message)
            raise RpcError(refusal.error) from None
        return _AttachStream(self._membership, link, requests, self._terms)
