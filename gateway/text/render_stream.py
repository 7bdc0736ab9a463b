"""Renders on one stream to one tokenizer service: a call of its own costs each more than twice as much."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from itertools import count

import grpc

from catenary.rpc import RpcError, error_of, refuse
from catenary.telemetry import current_traceparent, get_logger, request_id
from catenary.v1 import common_pb2, tokenizer_pb2, tokenizer_pb2_grpc

_log = get_logger(__name__)
_LOST = common_pb2.Error(
    code=common_pb2.ERROR_CODE_UNAVAILABLE, message="The service cannot be reached.", retryable=True
)


class RenderStream:
    """A stream while it lasts. To be opened outside of any request, whose context it would keep."""

    def __init__(self, stub: tokenizer_pb2_grpc.TokenizerServiceAsyncStub, max_answer_bytes: int) -> None:
        """`max_answer_bytes`: the largest message that the stub's channel takes."""
        self._max_answer_bytes = max_answer_bytes
        self._call = stub.RenderStream()
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[tokenizer_pb2.RenderResponse]] = {}
        # What is to be sent, by call: a render, or the cancel of one that was sent.
        self._outbound: OrderedDict[int, tokenizer_pb2.RenderStreamRequest] = OrderedDict()
        self._wake = asyncio.Event()
        self._tasks = [asyncio.create_task(self._write()), asyncio.create_task(self._read())]
        self.ended = False
        """It has broken, or its service drains."""

    async def render(
        self, request: tokenizer_pb2.RenderRequest, timeout_s: float
    ) -> tokenizer_pb2.RenderResponse:
        """The answer to a request. Raises RpcError: the service's, UNAVAILABLE if the stream ends before it,
        or TIMEOUT."""
        if self.ended:
            raise RpcError(_LOST)
        number = next(self._numbers)
        answer: asyncio.Future[tokenizer_pb2.RenderResponse] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self._send(
            tokenizer_pb2.RenderStreamRequest(
                call=number,
                render=request,
                caller_request_id=request_id() or "",
                traceparent=current_traceparent() or "",
                max_answer_bytes=self._max_answer_bytes,
            )
        )
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise overdue(timeout_s) from None
        finally:
            if self._waiting.pop(number, None) is not None:
                self._give_up(number)

    async def close(self) -> None:
        """End it, and what waits."""
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)

    def _send(self, message: tokenizer_pb2.RenderStreamRequest) -> None:
        self._outbound[message.call] = message
        self._wake.set()

    def _give_up(self, number: int) -> None:
        if self._outbound.pop(number, None) is None and not self.ended:
            cancel = tokenizer_pb2.CancelRender()
            self._send(tokenizer_pb2.RenderStreamRequest(call=number, cancel=cancel))

    async def _write(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._outbound:
                _, message = self._outbound.popitem(last=False)
                try:
                    await self._call.write(message)
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    # The reader of the same stream learns why it broke.
                    return

    async def _read(self) -> None:
        try:
            while isinstance(message := await self._call.read(), tokenizer_pb2.RenderStreamResponse):
                self._settle(message)
                # The waiting request goes first: to ask for the next message takes longer.
                await asyncio.sleep(0)
        except grpc.aio.AioRpcError as failure:
            # It concerns one of the requests, or none of them: each is to be asked again by itself.
            _log.warning(
                "stream of renders broke", status=failure.code().name, error=error_of(failure).message
            )
        finally:
            self.ended = True
            self._call.cancel()
            self._tasks[0].cancel()
            self._outbound.clear()
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
    """The refusal of a request to which no service has answered in time."""
    return refuse(
        common_pb2.ERROR_CODE_TIMEOUT,
        f"The tokenizer did not answer within {timeout_s:g} seconds (render-timeout-s).",
    )
