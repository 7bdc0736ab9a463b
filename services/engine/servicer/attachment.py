"""One attachment to one router: from the hello to the end of the stream."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import NoReturn

import grpc

from catenary.schema import MINIMUM_PEER_REVISION, SCHEMA_REVISION
from catenary.telemetry import get_logger
from catenary.v1 import common_pb2, engine_pb2, engine_pb2_grpc
from services.engine.link import CoreReady
from services.engine.servicer.hub import EngineHub
from services.engine.servicer.lease import Lease, LeaseRefused
from services.engine.servicer.mailbox import Mailbox

log = get_logger(__name__)

_GOODBYE_S = 1.0
_REFUSED = frozenset(
    {
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)


class AttachLost(Exception):
    """The router cannot be reached, or the stream ended; dial again."""


class AttachRefused(Exception):
    """The router does not want this engine as it is; the text is the router's."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this engine says it is."""

    instance_id: str
    engine_name: str
    version: str
    device: str
    served_model_name: str
    schema_revision: int = SCHEMA_REVISION
    minimum_peer_revision: int = MINIMUM_PEER_REVISION

    def hello(self, ready: CoreReady, state: engine_pb2.EngineState.ValueType) -> engine_pb2.EngineHello:
        """The first message of an attachment."""
        return engine_pb2.EngineHello(
            schema_revision=self.schema_revision,
            minimum_peer_revision=self.minimum_peer_revision,
            instance_id=self.instance_id,
            engine_name=self.engine_name,
            version=self.version,
            device=self.device,
            model=model_info(self.served_model_name, ready),
            capacity=capacity(ready),
            state=state,
        )


def model_info(served_model_name: str, ready: CoreReady) -> common_pb2.ModelInfo:
    """The core's model as the contract describes it."""
    model = ready.model
    return common_pb2.ModelInfo(
        name=served_model_name,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        dtype=model.dtype,
        tokenizer_sha256=model.tokenizer_sha256,
    )


def capacity(ready: CoreReady) -> engine_pb2.Capacity:
    """The core's capacity as the contract describes it."""
    facts = ready.capacity
    return engine_pb2.Capacity(
        block_size=facts.block_size,
        total_blocks=facts.total_blocks,
        max_running=facts.max_running,
        max_waiting=facts.max_waiting,
        max_batched_tokens=facts.max_batched_tokens,
    )


class Attachment:
    """A stream with its lease, three tasks (read, write, report) and one mailbox."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        identity: Identity,
        hub: EngineHub,
        mailbox: Mailbox,
        *,
        attach_timeout_s: float,
        orphan_timeout_s: float,
    ) -> None:
        self._stub = engine_pb2_grpc.FleetServiceStub(channel)
        self._identity = identity
        self._hub = hub
        self._mailbox = mailbox
        self._attach_timeout_s = attach_timeout_s
        self._orphan_timeout_s = orphan_timeout_s
        self._reports = 0
        self.attached = False

    async def run(self) -> NoReturn:
        """Attach and serve until the stream or the lease ends.

        Raises AttachRefused before a lease was granted, AttachLost in every other case. The router's
        sequences are aborted in the core by then.
        """
        call = self._stub.Attach()
        try:
            lease = await self._open(call)
            self.attached = True
            self._hub.join(self._mailbox)
            log.info("attached to a router", router=lease.router, epoch=lease.epoch, lease_s=lease.limit_s)
            await self._serve(call, lease)
        finally:
            self._hub.leave(self._mailbox)
            call.cancel()

    async def _open(self, call: _Call) -> Lease:
        ready = self._hub.ready
        if ready is None:
            raise AttachLost("the core was never ready")
        try:
            async with asyncio.timeout(self._attach_timeout_s):
                await call.write(engine_pb2.AttachRequest(hello=self._identity.hello(ready, self._hub.state)))
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
        except* AttachLost as lost:
            reason = str(lost.exceptions[0])
        except* (grpc.RpcError, asyncio.InvalidStateError):
            reason = str(await self._why(call))
        raise AttachLost(reason)

    async def _read(self, call: _Call, lease: Lease) -> None:
        while True:
            await self._mailbox.room()
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
                    self._hub.submit(self._mailbox, message.submit)
                case "abort":
                    self._hub.abort(self._mailbox, message.abort.handle)
                case _:
                    pass

    async def _write(self, call: _Call, lease: Lease) -> None:
        while True:
            await self._mailbox.ready()
            messages, load_due = self._mailbox.take()
            if load_due:
                messages.append(engine_pb2.AttachRequest(load=self._load()))
            for message in messages:
                message.lease_epoch = lease.epoch
                await call.write(message)
            if self._mailbox.closing is not None and self._mailbox.empty:
                await call.done_writing()
                await asyncio.wait([asyncio.ensure_future(call.code())], timeout=_GOODBYE_S)
                raise AttachLost(self._mailbox.closing)

    async def _report(self, lease: Lease) -> None:
        while (left := lease.left_s(time.monotonic())) > 0:
            self._mailbox.request_load()
            await asyncio.sleep(min(lease.interval_s, left))
        raise _expired(lease)

    def _load(self) -> engine_pb2.LoadReport:
        self._reports += 1
        report = self._hub.load()
        report.sequence = self._reports
        return report

    async def _why(self, call: _Call) -> AttachLost | AttachRefused:
        code = await call.code()
        reason = f"{code.name}: {await call.details() or 'no details'}"
        return AttachRefused(reason) if code in _REFUSED and not self.attached else AttachLost(reason)


def _expired(lease: Lease) -> AttachLost:
    return AttachLost(f"the router was silent for {lease.limit_s:g} s")


_Call = grpc.aio.StreamStreamCall[engine_pb2.AttachRequest, engine_pb2.AttachResponse]
