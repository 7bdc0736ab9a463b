"""Client of one tokenizer service: its health, and the stream of its renders."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from catenary.outbox import Messages, Outbox
from catenary.rpc import RpcError, error_of, refuse
from catenary.telemetry import current_traceparent, get_logger, request_id
from catenary.v1 import common_pb2, tokenizer_pb2, tokenizer_pb2_grpc

_log = get_logger(__name__)
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Rendered:
    """Token ids of prompts. `text_tails`: the last characters of each, which show a parser how a chat's
    answer begins; empty for prompts that are not chats."""

    prompts: list[list[int]]
    text_tails: list[str]
    second_starts: list[int] = field(default_factory=list)
    """Index of the first token of the second text, for pairs; 0 if unknown."""

    @classmethod
    def of_ids(cls, prompts: list[list[int]]) -> Rendered:
        return cls(prompts, [""] * len(prompts))

    def truncated(self, keep: int) -> Rendered:
        """Keep the last `keep` tokens of each prompt; `keep` is at least 1."""
        return Rendered([prompt[-keep:] for prompt in self.prompts], self.text_tails)


_LOST = common_pb2.Error(
    code=common_pb2.ERROR_CODE_UNAVAILABLE, message="The service cannot be reached.", retryable=True
)


class RenderStream:
    """Stream until it breaks. Open it outside of any request: it would keep the request's context."""

    def __init__(self, stub: tokenizer_pb2_grpc.TokenizerServiceAsyncStub, max_answer_bytes: int) -> None:
        """Open the stream. `max_answer_bytes`: largest message that the stub's channel accepts."""
        self._max_answer_bytes = max_answer_bytes
        self._call = stub.RenderStream()
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[tokenizer_pb2.RenderResponse]] = {}
        # By call: renders, and cancels of calls whose render was sent.
        self._requests: Messages[tokenizer_pb2.RenderStreamRequest] = Messages()
        self._outbox = Outbox(self._requests)
        self._tasks = [asyncio.create_task(self._write()), asyncio.create_task(self._read())]
        self.ended = False
        """Whether it has broken, or its service drains."""

    async def render(
        self, request: tokenizer_pb2.RenderRequest, timeout_s: float
    ) -> tokenizer_pb2.RenderResponse:
        """Return the answer to a request.

        Raise RpcError: the service's own, UNAVAILABLE if the stream ends before the answer, or TIMEOUT.
        """
        if self.ended:
            raise RpcError(_LOST)
        number = next(self._numbers)
        answer: asyncio.Future[tokenizer_pb2.RenderResponse] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        message = tokenizer_pb2.RenderStreamRequest(
            call=number,
            render=request,
            caller_request_id=request_id() or "",
            traceparent=current_traceparent() or "",
            max_answer_bytes=self._max_answer_bytes,
        )
        self._outbox.put(self._requests, message, number)
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise overdue(timeout_s) from None
        finally:
            if self._waiting.pop(number, None) is not None:
                self._give_up(number)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)

    def _give_up(self, number: int) -> None:
        if not self._requests.take_back(number) and not self.ended:
            cancel = tokenizer_pb2.RenderStreamRequest(call=number, cancel=tokenizer_pb2.CancelRender())
            self._outbox.put(self._requests, cancel)

    async def _write(self) -> None:
        while (message := await self._outbox.next()) is not None:
            try:
                await self._call.write(message)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                # The reader of the same stream learns why it broke.
                return

    async def _read(self) -> None:
        try:
            while isinstance(message := await self._call.read(), tokenizer_pb2.RenderStreamResponse):
                self._settle(message)
                # Let the waiting request run before the next read, which takes longer.
                await asyncio.sleep(0)
        except grpc.aio.AioRpcError as failure:
            # The failure may be due to one of the requests, or to none: each is made again by itself.
            _log.warning(
                "stream of renders broke", status=failure.code().name, error=error_of(failure).message
            )
        finally:
            self.ended = True
            self._call.cancel()
            self._tasks[0].cancel()
            self._outbox.clear()
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(RpcError(_LOST))
            self._waiting.clear()

    def _settle(self, message: tokenizer_pb2.RenderStreamResponse) -> None:
        answer = self._waiting.pop(message.call, None)
        if answer is None or answer.done():
            return
        if message.HasField("error"):
            answer.set_exception(RpcError(message.error))
        else:
            answer.set_result(message.rendered)


def overdue(timeout_s: float) -> RpcError:
    """Return the error of a request that no service has answered in time."""
    return refuse(
        common_pb2.ERROR_CODE_TIMEOUT,
        f"The tokenizer did not answer within {timeout_s:g} seconds (render-timeout-s).",
    )


SERVICE = "catenary.v1.TokenizerService"
# Of the health checks; --tokenizer-silence-s is the time after which a service counts as away.
_PERIOD_S = 2.0
_FEWEST_CHECKS = 5
# Unanswered checks in a row after which calls are better made elsewhere.
_HESITATION = 2
# Of the checks of a service that is away: requests may wait for it.
_RETURN_PERIOD_S = 0.2
# By which gRPC's deadline may end before that of the loop's clock.
_CLOCK_SLACK_S = 0.05
_SERVING = health_pb2.HealthCheckResponse.SERVING
# Larger requests are calls of their own: they would delay others, and one that exceeds a message would end
# the stream.
LARGEST_STREAMED = 64 << 10


class TokenizerTarget:
    """Service with health checks every two seconds, or more often for a short `silence_s`.

    Checks without a good answer are counted, not seconds: a gateway that stood still itself has checked
    nothing meanwhile."""

    def __init__(
        self,
        address: str,
        channel: grpc.aio.Channel,
        *,
        silence_s: float,
        max_message_mib: int,
        on_change: Callable[[], None],
    ) -> None:
        """Prepare the checks. `max_message_mib`: of the channel. `on_change`: called when the service begins
        or ceases to answer."""
        self.stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        self._on_change = on_change
        # Calls under way, by the timeout that fires when the call is given up, with the model of each.
        self._calls: dict[asyncio.Timeout, str] = {}
        self._models: frozenset[str] | None = None
        self._address = address
        self._channel = channel
        self._max_answer_bytes = max_message_mib << 20
        self._stream: RenderStream | None = None
        self._health = health_pb2_grpc.HealthStub(channel)
        self._period_s = min(_PERIOD_S, silence_s / _FEWEST_CHECKS)
        self._most_misses = math.ceil(silence_s / self._period_s)
        self._misses = self._most_misses
        self._silences = 0
        self._unanswered = False
        self._doubted = asyncio.Event()

    @property
    def answering(self) -> bool:
        """Whether it has answered within `silence_s`; False before its first answer."""
        return self._misses < self._most_misses

    @property
    def prompt(self) -> bool:
        """Whether it answered its last check."""
        return not self._misses

    @property
    def hesitates(self) -> bool:
        """Whether several checks in a row went unanswered.

        A service that answers that it does not serve may still answer the calls that it has.
        """
        return self._silences >= min(_HESITATION, self._most_misses)

    @property
    def silent(self) -> bool:
        """Whether it has left so many checks unanswered that it counts as away."""
        return self._silences >= self._most_misses

    @property
    def streams(self) -> bool:
        """Whether small calls have a stream to go on."""
        return self._stream is not None and not self._stream.ended

    @property
    def live(self) -> int:
        return len(self._calls)

    @asynccontextmanager
    async def calling(self, model: str) -> AsyncIterator[None]:
        """Count the enclosed call as under way. Raise TimeoutError if it is given up."""
        async with asyncio.timeout(None) as patience:
            self._calls[patience] = model
            try:
                yield
            finally:
                self._calls.pop(patience, None)

    def give_up(self, is_lost: Callable[[str], bool]) -> None:
        """Give up the calls for models of which `is_lost` is true."""
        now = asyncio.get_running_loop().time()
        for patience, model in list(self._calls.items()):
            if is_lost(model):
                del self._calls[patience]
                patience.reschedule(now)

    def has(self, model: str) -> bool:
        """Return whether it serves the model; True before it has listed its models."""
        return self._models is None or not model or model in self._models

    async def render(
        self, request: tokenizer_pb2.RenderRequest, timeout_s: float
    ) -> tokenizer_pb2.RenderResponse:
        """Return the rendered prompts of a request. Raise RpcError."""
        stream = self._stream
        if stream is not None and not stream.ended and request.ByteSize() <= LARGEST_STREAMED:
            return await stream.render(request, timeout_s)
        return await self.unary(self.stub.Render, request, timeout_s)

    async def unary(self, method: Callable[..., Awaitable[R]], request: Any, timeout_s: float) -> R:
        """Call a method of `stub`. Raise RpcError."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        try:
            return await method(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as failure:
            error = error_of(failure)
        if error.code == common_pb2.ERROR_CODE_TIMEOUT and loop.time() > deadline - _CLOCK_SLACK_S:
            raise overdue(timeout_s)
        raise RpcError(error)

    def heard(self) -> None:
        if not self.answering:
            _log.info("tokenizer service answers", address=self._address)
        was_prompt, self._misses, self._silences = self.prompt, 0, 0
        if not was_prompt:
            self._on_change()

    def failed(self) -> None:
        """Note a call that failed as if the service were away: prefer others until it answers a check."""
        if self.prompt:
            self.missed()
        self._doubted.set()

    async def run(self) -> None:
        """Check the service until cancelled. Calls on the stream fail then as at a service that is away."""
        try:
            while True:
                await self._watch()
        finally:
            if self._stream is not None:
                await self._stream.close()

    async def close(self) -> None:
        """Close the channel. Calls under way end as if their callers were cancelled."""
        await self._channel.close()

    async def _watch(self) -> None:
        """Check once, then wait for the next check; check more often while the service is doubted or away."""
        loop = asyncio.get_running_loop()
        due = loop.time() + self._period_s
        self._unanswered = False
        if not await self._ask():
            self._silences = self._silences + 1 if self._unanswered else 0
            self.missed()
        while (left := due - loop.time()) > 0:
            self._doubted.clear()
            try:
                async with asyncio.timeout(left if self.prompt else min(left, _RETURN_PERIOD_S)):
                    await self._doubted.wait()
            except TimeoutError:
                pass
            else:
                await asyncio.sleep(min(left, _RETURN_PERIOD_S))
            if not self.prompt and due > loop.time():
                # Not counted as a miss: misses stand for time.
                await self._ask()

    async def _ask(self) -> bool:
        """Check now; return whether the service serves."""
        serves = await self._serves()
        if serves:
            if self._stream is None or self._stream.ended:
                self._stream = RenderStream(self.stub, self._max_answer_bytes)
            self.heard()
        return serves

    async def _serves(self) -> bool:
        request = health_pb2.HealthCheckRequest(service=SERVICE)
        try:
            response = await self._health.Check(request, timeout=self._period_s)
            serving = bool(response.status == _SERVING)
            if serving:
                listed = await self.stub.ListTokenizers(
                    tokenizer_pb2.ListTokenizersRequest(), timeout=self._period_s
                )
                self._models = frozenset(tokenizer.model for tokenizer in listed.tokenizers)
        except grpc.aio.AioRpcError as failure:
            if failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                self._unanswered = True
            return False
        return serving

    def missed(self) -> None:
        was_answering = self.answering
        self._misses = min(self._misses + 1, self._most_misses)
        if was_answering and not self.answering:
            _log.warning("tokenizer service does not answer", address=self._address)
        self._on_change()
