"""Renders on one stream: the service's side over real gRPC, and the gateway's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from prometheus_client import REGISTRY

from catenary.rpc import RpcError, error_of
from catenary.telemetry import bind_request
from catenary.v1 import common_pb2
from catenary.v1 import tokenizer_pb2 as pb
from gateway.text.target import RenderStream
from services.tokenizer.servicer import METHOD
from tests.support import tiny_tokenizer as tiny
from tests.support.tokenizer_service import (
    RunningTokenizer,
    chat_request,
    completion_request,
    running_tokenizer,
)

TIMEOUT_S = 20.0


def ask(call: int, request: pb.RenderRequest) -> pb.RenderStreamRequest:
    return pb.RenderStreamRequest(call=call, render=request)


def handled(code: str) -> float:
    labels = {"method": METHOD, "code": code}
    return REGISTRY.get_sample_value("catenary_rpc_server_handled_total", labels) or 0.0


@asynccontextmanager
async def stream_to(running: RunningTokenizer) -> AsyncIterator[RenderStream]:
    stream = RenderStream(running.stub, 1 << 20)
    try:
        yield stream
    finally:
        await stream.close()


async def test_answers_are_those_of_calls_and_errors_end_nothing_else(tmp_path: Path) -> None:
    asked = [
        chat_request(("user", "hello")),
        completion_request("a", "bc"),
        completion_request("too long", max_prompt_tokens=1),
        completion_request("x", model="another"),
    ]
    before = handled("OK"), handled("INVALID_ARGUMENT"), handled("NOT_FOUND")
    async with running_tokenizer(tmp_path, workers=2) as running:
        stream: Any = running.stub.RenderStream()
        for call, request in enumerate(asked):
            await stream.write(ask(call, request))
        answers: dict[int, Any] = {}
        for _ in asked:
            answer = await stream.read()
            answers[answer.call] = answer
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF
        assert await stream.code() is grpc.StatusCode.OK
        assert [answers[call].rendered for call in (0, 1)] == [
            await running.stub.Render(request) for request in asked[:2]
        ]
    assert answers[2].error.code == common_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED
    assert answers[3].error.code == common_pb2.ERROR_CODE_MODEL_NOT_FOUND
    after = handled("OK"), handled("INVALID_ARGUMENT"), handled("NOT_FOUND")
    # Two on the stream and two calls.
    assert [now - then for now, then in zip(after, before, strict=True)] == [4, 1, 1]


async def test_what_is_no_request_ends_the_stream(tmp_path: Path) -> None:
    async with running_tokenizer(tmp_path) as running:
        stream: Any = running.stub.RenderStream()
        await stream.write(pb.RenderStreamRequest(call=1))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.read()
        assert error_of(caught.value).code == common_pb2.ERROR_CODE_INVALID_ARGUMENT
        # A cancel of what is not there is none.
        stream = running.stub.RenderStream()
        await stream.write(pb.RenderStreamRequest(call=7, cancel=pb.CancelRender()))
        await stream.write(ask(7, completion_request("a")))
        assert (await stream.read()).rendered.prompts
        stream.cancel()


async def test_a_number_in_use_ends_the_stream(tmp_path: Path) -> None:
    async with running_tokenizer(tmp_path) as running:
        stream: Any = running.stub.RenderStream()
        for _ in range(2):
            await stream.write(ask(1, completion_request("a" * 30_000)))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [message async for message in stream]
        assert error_of(caught.value).code == common_pb2.ERROR_CODE_INVALID_ARGUMENT


async def test_an_answer_that_is_too_large_for_the_client_is_refused_alone(tmp_path: Path) -> None:
    async with running_tokenizer(tmp_path) as running:
        stream = RenderStream(running.stub, 1000)
        large, small = await asyncio.gather(
            stream.render(completion_request("a" * 2000), TIMEOUT_S),
            stream.render(completion_request("b"), TIMEOUT_S),
            return_exceptions=True,
        )
        assert isinstance(large, RpcError)
        assert large.error.code == common_pb2.ERROR_CODE_INVALID_ARGUMENT
        assert "1000 bytes" in large.error.message
        assert not large.error.retryable
        assert not isinstance(small, BaseException)
        assert not stream.ended
        await stream.close()


class Overtaken:
    """A stream whose end overtook the first write: grpc.aio tells INTERNAL in place of the status."""

    def __init__(self) -> None:
        self._over = asyncio.Event()

    def _error(self) -> grpc.aio.AioRpcError:
        none = grpc.aio.Metadata()
        return grpc.aio.AioRpcError(
            grpc.StatusCode.INTERNAL, none, none, "Internal error from Core", "Failed execute_batch"
        )

    async def write(self, _message: Any) -> None:
        self._over.set()
        raise self._error()

    async def read(self) -> Any:
        await self._over.wait()
        raise self._error()

    def cancel(self) -> None:
        pass


async def test_a_lost_status_is_no_answer_to_anybody() -> None:
    stub: Any = SimpleNamespace(RenderStream=Overtaken)
    stream = RenderStream(stub, 1000)
    for _ in range(2):
        # Retryable: it is asked as a call, which tells why.
        with pytest.raises(RpcError) as lost:
            await stream.render(completion_request("a"), TIMEOUT_S)
        assert lost.value.error.code == common_pb2.ERROR_CODE_UNAVAILABLE
        assert lost.value.error.retryable
    assert stream.ended


async def test_many_at_once(tmp_path: Path) -> None:
    async with running_tokenizer(tmp_path) as running, stream_to(running) as stream:
        answers = await asyncio.gather(
            *(stream.render(completion_request(str(number)), TIMEOUT_S) for number in range(20))
        )
        ids = [list(answer.prompts[0].token_ids) for answer in answers]
        assert ids == [tiny.byte_ids(str(number)) for number in range(20)]


async def test_a_service_that_drains_ends_the_stream_with_its_last_answer(tmp_path: Path) -> None:
    async with running_tokenizer(tmp_path, drain_s=10) as running, stream_to(running) as stream:
        assert await stream.render(completion_request("a"), TIMEOUT_S)
        asked = asyncio.create_task(stream.render(completion_request("b" * 10_000), TIMEOUT_S))
        assert await stream.render(completion_request("c"), TIMEOUT_S)
        await running.service.drain()
        assert await asked
        with pytest.raises(RpcError) as refused:
            await stream.render(completion_request("d"), TIMEOUT_S)
        assert refused.value.error.code == common_pb2.ERROR_CODE_UNAVAILABLE
        assert refused.value.error.retryable
        assert stream.ended


async def test_who_gives_up_leaves_nothing(tmp_path: Path) -> None:
    async with running_tokenizer(tmp_path) as running, stream_to(running) as stream:
        with bind_request("req-1", None):
            waits = asyncio.create_task(stream.render(completion_request("a" * 30_000), TIMEOUT_S))
        await asyncio.sleep(0)
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits
        with pytest.raises(RpcError) as late:
            await stream.render(completion_request("a" * 30_000), 0.0)
        assert late.value.error.code == common_pb2.ERROR_CODE_TIMEOUT
        with pytest.raises(RpcError) as refused:
            await stream.render(completion_request(), TIMEOUT_S)
        assert refused.value.error.param == "prompt"
        assert not stream.ended


async def test_what_waits_is_told_when_the_stream_breaks(tmp_path: Path) -> None:
    async with running_tokenizer(tmp_path) as running, stream_to(running) as stream:
        assert await stream.render(completion_request("a"), TIMEOUT_S)
        waits = [
            asyncio.create_task(stream.render(completion_request("b" * 30_000), TIMEOUT_S)) for _ in range(3)
        ]
        await asyncio.sleep(0)
        await stream.close()
        for waiting in waits:
            with pytest.raises(RpcError) as lost:
                await waiting
            assert lost.value.error.code == common_pb2.ERROR_CODE_UNAVAILABLE
