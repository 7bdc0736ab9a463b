"""RouterService.Session: a gateway's multiplexed stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc

from catenary.rpc import RpcError, refuse
from catenary.schema import SCHEMA_REVISION, revision_mismatch
from catenary.telemetry import get_logger
from catenary.v1 import common_pb2, router_pb2
from services.router.admission import MAX_NAME_LENGTH, Refused
from services.router.dispatch import AbortCause, ReaderWatch, Session, SessionHub
from services.router.service.streams import INTERNAL, SLOW_READER, Cut, first_message

_log = get_logger(__name__)


class SessionStreams:
    """Carries `Session`s of a hub over Session streams."""

    def __init__(
        self,
        hub: SessionHub,
        watch: ReaderWatch,
        *,
        router_instance_id: str,
        heartbeat_ms: int,
        hello_timeout_s: float,
    ) -> None:
        self._hub = hub
        self._watch = watch
        self._router_instance_id = router_instance_id
        self._heartbeat_ms = heartbeat_ms
        self._hello_timeout_s = hello_timeout_s

    async def serve(
        self, requests: AsyncIterator[router_pb2.SessionRequest]
    ) -> AsyncIterator[router_pb2.SessionResponse]:
        """One session, to its end."""
        first = await first_message(requests, "hello", timeout_s=self._hello_timeout_s)
        _check(first.hello)
        try:
            session = self._hub.open()
        except Refused as refusal:
            raise RpcError(refusal.error) from None
        instance = first.hello.instance_id
        _log.info("gateway connected", instance=instance)
        cut = Cut()
        watched = self._watch.add(lambda _strikes: self._not_reading(session, instance, cut))
        failures: list[common_pb2.Error] = []
        reader = asyncio.create_task(self._read(requests, session, failures))
        try:
            watched.writing()
            yield self._welcome()
            watched.written()
            async for message in session.outbox.messages():
                watched.writing()
                yield message
                watched.written()
            if failures:
                raise RpcError(failures[0])
        except GeneratorExit:
            cut.explain(SLOW_READER)
            raise
        finally:
            reader.cancel()
            self._watch.remove(watched)
            self._hub.close(session, AbortCause.SESSION_END)
            _log.info("gateway left", instance=instance)

    async def _read(
        self,
        requests: AsyncIterator[router_pb2.SessionRequest],
        session: Session,
        failures: list[common_pb2.Error],
    ) -> None:
        try:
            async for request in requests:
                session.receive(request)
                # It is on its way to an engine first: to ask for the next message takes longer.
                await asyncio.sleep(0)
                await session.outbox.room()
        except (Refused, RpcError) as refusal:
            failures.append(refusal.error)
        except (grpc.aio.InternalError, grpc.aio.UsageError):
            _log.debug("session stream broke")
        except Exception:
            _log.exception("session message failed")
            failures.append(INTERNAL)
        self._hub.close(session, AbortCause.SESSION_END)

    def _not_reading(self, session: Session, instance: str, cut: Cut) -> None:
        _log.warning("gateway does not read; its session is ended", instance=instance)
        self._hub.close(session, AbortCause.SLOW_READER)
        cut.now()

    def _welcome(self) -> router_pb2.SessionResponse:
        welcome = router_pb2.SessionWelcome(
            schema_revision=SCHEMA_REVISION,
            router_instance_id=self._router_instance_id,
            heartbeat_ms=self._heartbeat_ms,
        )
        return router_pb2.SessionResponse(welcome=welcome)


def _check(hello: router_pb2.SessionHello) -> None:
    mismatch = revision_mismatch(hello.schema_revision, hello.minimum_peer_revision, peer="gateway")
    if mismatch is not None:
        raise refuse(common_pb2.ERROR_CODE_SCHEMA_MISMATCH, mismatch)
    if not 1 <= len(hello.instance_id) <= MAX_NAME_LENGTH:
        raise refuse(
            common_pb2.ERROR_CODE_INVALID_ARGUMENT,
            f"The hello's instance_id must have 1 to {MAX_NAME_LENGTH} characters.",
            param="instance_id",
        )
