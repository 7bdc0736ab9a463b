"""FleetService: the engines' side of the router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc

from catenary.columns import MalformedStep
from catenary.rpc import RpcError
from catenary.schema import SCHEMA_REVISION
from catenary.telemetry import get_logger
from catenary.v1 import common_pb2, engine_pb2, engine_pb2_grpc
from services.router.admission import Refused
from services.router.dispatch import EngineLink, LossReason, Membership, ReaderWatch
from services.router.service.publish import KvStreams
from services.router.service.streams import INTERNAL, SLOW_READER, Cut, first_message

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class AttachTerms:
    """The answer to an engine that is let in. Times in milliseconds."""

    router_instance_id: str
    lease_ms: int
    report_interval_ms: int
    hello_timeout_s: float


class FleetServicer(engine_pb2_grpc.FleetServiceServicer):
    """Carries `Membership` over Attach streams, and what engines cache over `kv`."""

    def __init__(self, membership: Membership, watch: ReaderWatch, terms: AttachTerms, kv: KvStreams) -> None:
        self._membership = membership
        self._kv = kv
        self._watch = watch
        self._terms = terms

    async def Attach(
        self,
        request_iterator: AsyncIterator[engine_pb2.AttachRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[engine_pb2.AttachResponse]:
        """See the proto."""
        first = await first_message(request_iterator, "hello", timeout_s=self._terms.hello_timeout_s)
        try:
            link = self._membership.attach(first.hello)
        except Refused as refusal:
            _log.warning("engine refused", engine=first.hello.engine_name[:64], reason=refusal.error.message)
            raise RpcError(refusal.error) from None
        cut = Cut()
        watched = self._watch.add(lambda _strikes: self._not_reading(link, cut))
        reader = asyncio.create_task(self._read(request_iterator, link))
        try:
            watched.writing()
            yield self._welcome(link)
            watched.written()
            async for message in link.messages():
                watched.writing()
                yield message
                watched.written()
            if link.error is not None:
                raise RpcError(link.error)
        except GeneratorExit:
            cut.explain(SLOW_READER)
            raise
        finally:
            reader.cancel()
            self._watch.remove(watched)
            self._membership.leave(link, LossReason.STREAM_ENDED)

    def PublishKv(
        self,
        request_iterator: AsyncIterator[engine_pb2.PublishKvRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[engine_pb2.PublishKvResponse]:
        """See the proto."""
        return self._kv.serve(request_iterator)

    async def _read(self, requests: AsyncIterator[engine_pb2.AttachRequest], link: EngineLink) -> None:
        try:
            async for request in requests:
                self._membership.receive(link, request)
            self._membership.leave(link, LossReason.STREAM_ENDED)
        except (Refused, RpcError) as refusal:
            self._membership.leave(link, LossReason.PROTOCOL, refusal.error)
        except MalformedStep as fault:
            _log.error("engine broke the contract", engine=link.engine.name, fault=str(fault))
            text = f"The step is malformed: {fault}."
            error = common_pb2.Error(code=common_pb2.ERROR_CODE_INVALID_ARGUMENT, message=text)
            self._membership.leave(link, LossReason.PROTOCOL, error)
        except (grpc.aio.InternalError, grpc.aio.UsageError):
            self._membership.leave(link, LossReason.STREAM_ENDED)
        except Exception:
            _log.exception("engine message failed", engine=link.engine.name)
            self._membership.leave(link, LossReason.PROTOCOL, INTERNAL)

    def _not_reading(self, link: EngineLink, cut: Cut) -> None:
        self._membership.leave(link, LossReason.NOT_READING)
        cut.now()

    def _welcome(self, link: EngineLink) -> engine_pb2.AttachResponse:
        terms = self._terms
        attached = engine_pb2.Attached(
            schema_revision=SCHEMA_REVISION,
            router_instance_id=terms.router_instance_id,
            lease_epoch=link.engine.epoch,
            lease_ms=terms.lease_ms,
            report_interval_ms=terms.report_interval_ms,
        )
        return engine_pb2.AttachResponse(attached=attached)
