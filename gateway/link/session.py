"""The multiplexed stream to the router: connected for life, connected again whenever it breaks."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import Protocol, TypeAlias

import grpc

from catenary.backoff import Backoff
from catenary.columns import MalformedStep
from catenary.schema import MINIMUM_PEER_REVISION, SCHEMA_REVISION, revision_mismatch
from catenary.telemetry import get_logger
from catenary.v1 import common_pb2, engine_pb2, router_pb2, router_pb2_grpc
from gateway.errors import from_wire, overloaded, timed_out, unavailable
from gateway.link.inbox import SequenceEnded, SequenceFeed
from gateway.link.silence import Silence
from gateway.link.steps import deliver

_log = get_logger(__name__)
_FIRST_BACKOFF_S = 0.05
_LONGEST_BACKOFF_S = 3.0
# A router may be late with one heartbeat, and a network with another.
_FEWEST_HEARTBEATS = 3

OnModels = Callable[[Sequence[router_pb2.ServedModel]], None]
_Call: TypeAlias = "grpc.aio.StreamStreamCall[router_pb2.SessionRequest, router_pb2.SessionResponse]"


class LinkRefused(Exception):
    """The router cannot be worked with: another schema, or no proper greeting. The text is for the log."""


class Session(Protocol):
    """Where sequences go. Implemented by `RouterSession`; neither method waits."""

    def submit(
        self, spec: common_pb2.SequenceSpec, feed: SequenceFeed, same_prompt_as: int | None = None
    ) -> int:
        """Send a sequence off; its output goes to `feed`. Returns its handle.

        `same_prompt_as` is the handle of another sequence with the same prompt. Raises ApiError.
        """

    def abort(self, handle: int) -> None:
        """Give a sequence up. Its output is not looked at any more. Idempotent."""


class RouterSession:
    """Sequences of all requests on one stream.

    `run` keeps the stream up; the other methods never wait. When the stream breaks, or the router is silent
    for `silence_s` although it promised heartbeats, each sequence on it ends with a retryable error: the
    router has aborted them all, or does when it comes back."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        *,
        instance_id: str,
        on_models: OnModels,
        connect_timeout_s: float,
        silence_s: float,
        max_outbound: int,
    ) -> None:
        self._stub = router_pb2_grpc.RouterServiceStub(channel)
        self._instance_id = instance_id
        self._on_models = on_models
        self._connect_timeout_s = connect_timeout_s
        self._silence_s = silence_s
        self._max_outbound = max_outbound
        self._handles = count(1)
        self._feeds: dict[int, SequenceFeed] = {}
        self._outbound: deque[router_pb2.SessionRequest] = deque()
        self._unsent: dict[int, router_pb2.SessionRequest] = {}
        self._wake = asyncio.Event()
        self._greeted = False
        self.connected = False
        """Whether the router has greeted and the stream is up."""

    @property
    def live(self) -> int:
        """Sequences that were submitted and have not ended."""
        return len(self._feeds)

    def submit(
        self, spec: common_pb2.SequenceSpec, feed: SequenceFeed, same_prompt_as: int | None = None
    ) -> int:
        """Send a sequence to the router; its output goes to `feed`. Returns its handle.

        `same_prompt_as`: the handle of one that was submitted before with the same prompt, which may be
        computed once for both.

        Raises ApiError: not connected (503), or too much waits to be sent (429).
        """
        if not self.connected:
            raise unavailable("The router is not reachable.")
        if len(self._unsent) >= self._max_outbound:
            raise overloaded(f"More than {self._max_outbound} sequences wait to be sent to the router.")
        handle = next(self._handles)
        self._feeds[handle] = feed
        submit = common_pb2.Submit(handle=handle, spec=spec, same_prompt_as=same_prompt_as)
        message = router_pb2.SessionRequest(submit=submit)
        self._unsent[handle] = message
        self._send(message)
        return handle

    def abort(self, handle: int) -> None:
        """Give a sequence up. Its output is not looked at any more. Idempotent."""
        if self._feeds.pop(handle, None) is None:
            return
        if (message := self._unsent.pop(handle, None)) is not None:
            self._outbound.remove(message)
        elif self.connected:
            self._send(router_pb2.SessionRequest(abort=engine_pb2.AbortSequence(handle=handle)))

    async def run(self) -> None:
        """Keep the stream up until cancelled."""
        backoff = Backoff(_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S)
        while True:
            reason = await self._live_once()
            _log.warning("no router session", reason=reason)
            if self._greeted:
                backoff.reset()
            await asyncio.sleep(backoff.next_delay())

    async def _live_once(self) -> str:
        """Open the stream and stay on it until it breaks; why it did."""
        self._greeted = False
        call = self._stub.Session()
        writer: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                welcome = await self._greet(call)
            self._greeted = self.connected = True
            _log.info("router session open")
            writer = asyncio.create_task(self._write(call))
            return await self._listen(call, welcome)
        except grpc.aio.AioRpcError as error:
            return error.code().name
        except TimeoutError:
            return f"no answer within {self._connect_timeout_s:g} s"
        except LinkRefused as error:
            return str(error)
        finally:
            self._disconnect()
            call.cancel()
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
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._outbound:
                message = self._outbound.popleft()
                if message.HasField("submit"):
                    self._unsent.pop(message.submit.handle, None)
                try:
                    await call.write(message)
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    # The reader of the same stream learns why it broke.
                    return

    async def _listen(self, call: _Call, welcome: router_pb2.SessionWelcome) -> str:
        """Read until the stream breaks or the router falls silent; which of them it was."""
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
            elif kind == "models":
                self._on_models(response.models.models)
            elif kind == "refusal":
                self._refuse(response.refusal)
        return "closed by the router"

    def _deliver(self, step: common_pb2.StepOutput) -> None:
        try:
            for handle, overrun in deliver(step, self._feeds.get):
                if overrun:
                    self._drop_slow(handle)
                else:
                    self._feeds.pop(handle, None)
        except MalformedStep:
            raise LinkRefused("the router sent a malformed step") from None

    def _drop_slow(self, handle: int) -> None:
        feed = self._feeds[handle]
        self.abort(handle)
        feed.finish(SequenceEnded(error=timed_out("The client did not read its stream.", status=408)))

    def _refuse(self, refusal: common_pb2.Refusal) -> None:
        feed = self._feeds.pop(refusal.handle, None)
        if feed is not None:
            feed.finish(SequenceEnded(error=from_wire(refusal.error)))

    def _send(self, message: router_pb2.SessionRequest) -> None:
        self._outbound.append(message)
        self._wake.set()

    def _disconnect(self) -> None:
        self.connected = False
        self._outbound.clear()
        self._unsent.clear()
        feeds, self._feeds = list(self._feeds.values()), {}
        lost = unavailable("The connection to the router was lost. Please retry.")
        for feed in feeds:
            feed.finish(SequenceEnded(error=lost))
