"""Multiplexed stream to one router, which is opened again whenever it breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Protocol, TypeAlias

import grpc

from catenary.backoff import Backoff
from catenary.columns import MalformedStep
from catenary.outbox import Messages, Outbox
from catenary.schema import MINIMUM_PEER_REVISION, SCHEMA_REVISION, revision_mismatch
from catenary.telemetry import get_logger
from catenary.v1 import common_pb2, engine_pb2, router_pb2, router_pb2_grpc
from gateway.link.inbox import Reader, deliver

_log = get_logger(__name__)


_LOOKS = 4


class Silence:
    """Timer of a silent peer. Time in which this process itself stood still does not count: messages from
    then are unread."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._loop = asyncio.get_running_loop()
        self._heard = self._loop.time()

    def heard(self) -> None:
        self._heard = self._loop.time()

    async def wait(self) -> None:
        """Return once the peer has sent nothing for `limit_s` seconds."""
        look_s = self.limit_s / _LOOKS
        while (left := self._heard + self.limit_s - self._loop.time()) > 0:
            due = self._loop.time() + min(left, look_s)
            await asyncio.sleep(min(left, look_s))
            if self._loop.time() - due > look_s:
                self.heard()


# Bound on what a router may announce; ours announces fewer.
MAX_ENTRIES = 1024
_TEXT = "The server is full for requests of this kind. Try again later."

Key = tuple[str, int, str | None]


class Shed:
    """Load shedding of one router: the sequences that it would refuse, as it announced last.

    Each entry holds for its retry time at most. `clock` in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._entries: dict[Key, tuple[common_pb2.ErrorCode.ValueType, float]] = {}

    def update(self, state: router_pb2.ShedState) -> None:
        now = self._clock()
        self._entries = {
            (entry.model, entry.priority_class, entry.tenant if entry.HasField("tenant") else None): (
                entry.code,
                now + entry.retry_after_ms / 1000,
            )
            for entry in state.entries[:MAX_ENTRIES]
        }

    def clear(self) -> None:
        self._entries = {}

    def refusal(
        self, model: str, priority_class: common_pb2.PriorityClass.ValueType, tenant: str
    ) -> common_pb2.Error | None:
        """Return the error with which such a sequence would be refused; None if the router may accept it."""
        if not self._entries:
            return None
        now = self._clock()
        wanted = priority_class or common_pb2.PRIORITY_CLASS_DEFAULT
        for whose in (tenant, None):
            found = self._entries.get((model, wanted, whose))
            if found is not None and found[1] > now:
                return common_pb2.Error(
                    code=found[0],
                    message=_TEXT,
                    retryable=True,
                    retry_after_ms=max(1, round((found[1] - now) * 1000)),
                )
        return None


_FIRST_BACKOFF_S = 0.05
_LONGEST_BACKOFF_S = 3.0
# Until an address that led to the same router as another one is dialled again.
_TWICE_PAUSE_S = 30.0
# A router may be late with one heartbeat, and a network with another.
_FEWEST_HEARTBEATS = 3

_Call: TypeAlias = "grpc.aio.StreamStreamCall[router_pb2.SessionRequest, router_pb2.SessionResponse]"


class LinkRefused(Exception):
    """The router has another schema, or breaks the protocol. The text is for the log."""


class _Twice(Exception):
    """Another address leads to the same router."""


class Receiver(Reader, Protocol):
    """Receiver of an attempt of a sequence on a router's stream: any `extend`, then one of these."""

    def ended(self, end: common_pb2.SequenceEnd) -> None:
        """Take the end, good or not."""

    def refused(self, error: common_pb2.Error) -> None:
        """Take the router's refusal."""

    def lost(self) -> None:
        """Take the loss of the stream."""

    def unread(self) -> None:
        """Take the abort that followed an `extend` that returned False."""


class Listener(Protocol):
    """Receiver of the state of routers."""

    def greeted(self, session: RouterSession, router: str) -> bool:
        """Take the instance id of a router that has greeted. Return False if another session has it."""

    def changed(self, session: RouterSession) -> None:
        """Take a change: a router is connected, lost or draining, or serves other models."""


class RouterSession:
    """Sequences of all requests on one stream.

    `run` keeps the stream up; the other methods never wait. When the stream breaks, or the router sends
    nothing for `silence_s` although it promised heartbeats, all sequences on it are lost: the router has
    aborted them, or does so when it comes back."""

    def __init__(
        self,
        address: str,
        channel: grpc.aio.Channel,
        *,
        instance_id: str,
        listener: Listener,
        connect_timeout_s: float,
        silence_s: float,
    ) -> None:
        self.address = address
        self._channel = channel
        self._stub = router_pb2_grpc.RouterServiceStub(channel)
        self._instance_id = instance_id
        self._listener = listener
        self._connect_timeout_s = connect_timeout_s
        self._silence_s = silence_s
        self._handles = count(1)
        self._receivers: dict[int, Receiver] = {}
        # By handle: submits, and aborts of sequences whose submit was sent.
        self._submits: Messages[router_pb2.SessionRequest] = Messages()
        self._aborts: Messages[router_pb2.SessionRequest] = Messages()
        self._outbox = Outbox(self._submits, self._aborts)
        self._hurry = asyncio.Event()
        self._greeted = False
        self.connected = False
        """Whether the router has greeted and the stream is up."""
        self.draining = False
        self.router = ""
        """The router's instance, while it is connected."""
        self.models: dict[str, router_pb2.ServedModel] = {}
        """Models that it announced last, by name; empty while it is not connected."""
        self.shed = Shed(lambda: asyncio.get_running_loop().time())

    @property
    def live(self) -> int:
        """Sequences that were submitted here and have not ended."""
        return len(self._receivers)

    @property
    def unsent(self) -> int:
        return len(self._submits)

    def serves(self, model: str) -> bool:
        """Return whether engines of the router serve a model, as it announced last."""
        served = self.models.get(model)
        return served is not None and served.serving_engines > 0

    def hurry(self) -> None:
        """End the pause before the next attempt to connect."""
        self._hurry.set()

    def submit(self, submit: common_pb2.Submit, receiver: Receiver) -> int:
        """Submit a sequence, whose output goes to `receiver`. The session must be connected.

        Return the handle, which is entered in `submit`."""
        submit.handle = next(self._handles)
        self._receivers[submit.handle] = receiver
        self._outbox.put(self._submits, router_pb2.SessionRequest(submit=submit), submit.handle)
        return submit.handle

    def abort(self, handle: int) -> None:
        """Abort a sequence. Its receiver is not called any more. Idempotent."""
        if self._receivers.pop(handle, None) is None:
            return
        if not self._submits.take_back(handle) and self.connected:
            abort = engine_pb2.AbortSequence(handle=handle)
            self._outbox.put(self._aborts, router_pb2.SessionRequest(abort=abort))

    async def run(self) -> None:
        """Keep the stream up until cancelled."""
        backoff = Backoff(_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S)
        while True:
            self._hurry.clear()
            try:
                reason = await self._run_once()
            except _Twice:
                await self._pause(_TWICE_PAUSE_S)
                continue
            _log.warning("no router session", router=self.address, reason=reason)
            if self._greeted:
                backoff.reset()
            await self._pause(backoff.next_delay())

    async def close(self) -> None:
        """Close the channel, once `run` has ended."""
        await self._channel.close()

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._hurry.wait()
        except TimeoutError:
            pass

    async def _run_once(self) -> str:
        """Open the stream and stay on it until it breaks; return the reason."""
        self._greeted = False
        call = self._stub.Session()
        writer: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                welcome = await self._greet(call)
            if not self._listener.greeted(self, welcome.router_instance_id):
                raise _Twice
            self.router = welcome.router_instance_id
            self._greeted = self.connected = True
            _log.info("router session open", router=self.address)
            self._listener.changed(self)
            writer = asyncio.create_task(self._write(call))
            return await self._listen(call, welcome)
        except grpc.aio.AioRpcError as error:
            return error.code().name
        except TimeoutError:
            return f"no answer within {self._connect_timeout_s:g} s"
        except LinkRefused as error:
            return str(error)
        finally:
            call.cancel()
            self._disconnect()
            if writer is not None:
                writer.cancel()
                await asyncio.wait({writer})

    async def _greet(self, call: _Call) -> router_pb2.SessionWelcome:
        hello = router_pb2.SessionHello(
            schema_revision=SCHEMA_REVISION,
            minimum_peer_revision=MINIMUM_PEER_REVISION,
            instance_id=self._instance_id,
        )
        await call.write(router_pb2.SessionRequest(hello=hello))
        response = await call.read()
        if not isinstance(response, router_pb2.SessionResponse) or not response.HasField("welcome"):
            raise LinkRefused("the router sent no welcome")
        mismatch = revision_mismatch(response.welcome.schema_revision, 0, peer="router")
        if mismatch is not None:
            raise LinkRefused(mismatch)
        return response.welcome

    async def _write(self, call: _Call) -> None:
        while (message := await self._outbox.next()) is not None:
            try:
                await call.write(message)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                # The reader of the same stream learns why it broke.
                return

    async def _listen(self, call: _Call, welcome: router_pb2.SessionWelcome) -> str:
        """Read until the stream breaks or the router falls silent; return the reason."""
        if not welcome.heartbeat_ms:
            return await self._read(call, None)
        silence = Silence(max(self._silence_s, _FEWEST_HEARTBEATS * welcome.heartbeat_ms / 1000))
        reading = asyncio.create_task(self._read(call, silence))
        silent = asyncio.create_task(silence.wait())
        try:
            await asyncio.wait({reading, silent}, return_when=asyncio.FIRST_COMPLETED)
            return reading.result() if reading.done() else f"silent for {silence.limit_s:g} s"
        finally:
            reading.cancel()
            silent.cancel()
            await asyncio.wait({reading, silent})

    async def _read(self, call: _Call, silence: Silence | None) -> str:
        while isinstance(response := await call.read(), router_pb2.SessionResponse):
            if silence is not None:
                silence.heard()
            kind = response.WhichOneof("payload")
            if kind == "step":
                self._deliver(response.step)
                # Let the readers run before the next read, which takes longer than they do.
                await asyncio.sleep(0)
            elif kind == "models":
                self.models = {model.info.name: model for model in response.models.models}
                self._listener.changed(self)
            elif kind == "refusal":
                self._refuse(response.refusal)
            elif kind == "shed":
                self.shed.update(response.shed)
            elif kind == "draining":
                self.draining = True
                _log.info("router drains", router=self.address, deadline_ms=response.draining.deadline_ms)
                self._listener.changed(self)
        return "closed by the router"

    def _deliver(self, step: common_pb2.StepOutput) -> None:
        try:
            for handle, end in deliver(step, self._receivers.get):
                receiver = self._receivers[handle]
                if end is None:
                    self.abort(handle)
                    receiver.unread()
                else:
                    del self._receivers[handle]
                    receiver.ended(end)
        except MalformedStep:
            raise LinkRefused("the router sent a malformed step") from None

    def _refuse(self, refusal: common_pb2.Refusal) -> None:
        receiver = self._receivers.pop(refusal.handle, None)
        if receiver is not None:
            receiver.refused(refusal.error)

    def _disconnect(self) -> None:
        was, self.connected, self.draining, self.router = self.connected, False, False, ""
        self._outbox.clear()
        receivers, self._receivers = list(self._receivers.values()), {}
        if was:
            self._listener.changed(self)
        self.models = {}
        self.shed.clear()
        for receiver in receivers:
            receiver.lost()
