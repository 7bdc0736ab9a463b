"""One tokenizer service, and whether it answers."""

from __future__ import annotations

import asyncio
import math

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from catenary.rpc import RpcError, error_of
from catenary.telemetry import get_logger
from catenary.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from gateway.text.render_stream import RenderStream

_log = get_logger(__name__)
SERVICE = "catenary.v1.TokenizerService"
_PERIOD_S = 2.0
_FEWEST_CHECKS = 5
_SERVING = health_pb2.HealthCheckResponse.SERVING
# Larger requests are calls of their own: they would hold up others, and one that is too large for a message
# would end the stream.
LARGEST_STREAMED = 64 << 10


class TokenizerTarget:
    """Asks its address every two seconds whether it serves; with a short `silence_s` more often.

    What is counted are questions without a good answer, not seconds: a gateway that stood still itself has
    asked nothing meanwhile."""

    def __init__(
        self, address: str, channel: grpc.aio.Channel, *, silence_s: float, max_message_mib: int
    ) -> None:
        """`max_message_mib`: of the channel."""
        self.stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        self.calls = 0
        """Calls under way."""
        self.dropped = False
        """Nothing may be asked here any more; the channel is closed once no calls are under way."""
        self._models: frozenset[str] | None = None
        self._address = address
        self._channel = channel
        self._max_answer_bytes = max_message_mib << 20
        self._stream: RenderStream | None = None
        self._health = health_pb2_grpc.HealthStub(channel)
        self._period_s = min(_PERIOD_S, silence_s / _FEWEST_CHECKS)
        self._most_misses = math.ceil(silence_s / self._period_s)
        self._misses = self._most_misses

    @property
    def answering(self) -> bool:
        """Whether it has answered within the silence that is allowed; False before its first answer."""
        return self._misses < self._most_misses

    @property
    def prompt(self) -> bool:
        """Whether it answered when it was asked last."""
        return not self._misses

    def has(self, model: str) -> bool:
        """Whether it serves the model, by its last word; True of one that has not said what it serves."""
        return self._models is None or not model or model in self._models

    async def render(
        self, request: tokenizer_pb2.RenderRequest, timeout_s: float
    ) -> tokenizer_pb2.RenderResponse:
        """The answer to a request. Raises RpcError."""
        stream = self._stream
        if stream is not None and not stream.ended and request.ByteSize() <= LARGEST_STREAMED:
            return await stream.render(request, timeout_s)
        try:
            return await self.stub.Render(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as failure:
            raise RpcError(error_of(failure)) from None

    def heard(self) -> None:
        """It answered, to whatever question."""
        if not self.answering:
            _log.info("tokenizer service answers", address=self._address)
        self._misses = 0

    async def watch(self) -> None:
        """Ask, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + self._period_s
            if await self._serves():
                self.heard()
                if self._stream is None or self._stream.ended:
                    self._stream = RenderStream(self.stub, self._max_answer_bytes)
            else:
                self._missed()
            await asyncio.sleep(max(0.0, due - loop.time()))

    async def drop(self) -> None:
        """Ask nothing more, once `watch` has ended. What waits on the stream is away; calls of their own go
        on."""
        self.dropped = True
        if self._stream is not None:
            await self._stream.close()

    async def close(self) -> None:
        """Close the channel. Calls under way would end as if their callers were cancelled."""
        await self.drop()
        await self._channel.close()

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
        except grpc.aio.AioRpcError:
            return False
        return serving

    def _missed(self) -> None:
        was_answering = self.answering
        self._misses = min(self._misses + 1, self._most_misses)
        if was_answering and not self.answering:
            _log.warning("tokenizer service does not answer", address=self._address)
