"""What goes wrong on a stream of renders, and whom it concerns. The service's renders are scripted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from catenary.rpc import Role, RpcError, RpcServer, Secrets, open_channel, refuse
from catenary.v1 import common_pb2, tokenizer_pb2_grpc
from catenary.v1 import tokenizer_pb2 as pb
from gateway.text.target import RenderStream
from services.tokenizer.servicer import RenderStreams, StreamLimits
from tests.support.tokenizer_service import completion_request
from tests.support.waiting import eventually

TIMEOUT_S = 20.0
ACCESS = {"/catenary.v1.TokenizerService/": frozenset({Role.CLIENT})}


class Scripted(tokenizer_pb2_grpc.TokenizerServiceServicer):
    """Answers with as many tokens of four bytes as the prompt says. The prompt "wait" waits for `release`."""

    def __init__(self, server: RpcServer, limits: StreamLimits) -> None:
        self.server = server
        self.streams = RenderStreams(self._render, server.calls, limits)
        self.release = asyncio.Event()
        self.at_work = 0
        self.breaks: Exception | None = None
        """What who opens a stream meets."""

    async def RenderStream(self, requests: Any, context: Any) -> AsyncIterator[pb.RenderStreamResponse]:
        if self.breaks is not None:
            raise self.breaks
        async for answer in self.streams.serve(requests):
            yield answer

    async def _render(self, request: pb.RenderRequest) -> pb.RenderResponse:
        (prompt,) = request.completion.prompts
        self.at_work += 1
        try:
            if prompt == "wait":
                await self.release.wait()
                return pb.RenderResponse()
        finally:
            self.at_work -= 1
        return pb.RenderResponse(prompts=[pb.RenderedPrompt(token_ids=[1 << 21] * int(prompt))])


@asynccontextmanager
async def scripted(*, max_calls: int = 100, max_message_mib: int = 1) -> AsyncIterator[tuple[Scripted, Any]]:
    """A service, and the stub of a client whose messages may have 1 MiB."""
    server = RpcServer(
        listen=["127.0.0.1:0"],
        secrets=Secrets(None, None),
        insecure=True,
        access=ACCESS,
        max_message_mib=max_message_mib,
        max_calls=max_calls,
    )
    # Methods that it leaves out answer UNIMPLEMENTED.
    service = Scripted(server, StreamLimits(max_calls, max_message_mib))  # type: ignore[abstract]
    tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(service, server.grpc)
    (target,) = await server.start()
    try:
        async with open_channel(target, secret=None, max_message_mib=1) as channel:
            yield service, tokenizer_pb2_grpc.TokenizerServiceStub(channel)
    finally:
        await server.stop(0)


@asynccontextmanager
async def stream_to(stub: Any, *, max_answer_mib: int = 1) -> AsyncIterator[RenderStream]:
    stream = RenderStream(stub, max_answer_mib << 20)
    try:
        yield stream
    finally:
        await stream.close()


async def render(stream: RenderStream, prompt: str) -> pb.RenderResponse:
    return await stream.render(completion_request(prompt), TIMEOUT_S)


async def error_from(stream: RenderStream, prompt: str) -> common_pb2.Error:
    with pytest.raises(RpcError) as caught:
        await render(stream, prompt)
    return caught.value.error


async def test_an_answer_that_is_too_large_is_refused_alone() -> None:
    async with scripted() as (service, stub), stream_to(stub) as stream:
        waits = asyncio.create_task(render(stream, "wait"))
        await eventually(lambda: service.at_work == 1, "one is at work")
        error = await error_from(stream, str(300_000))
        assert error.code == common_pb2.ERROR_CODE_INVALID_ARGUMENT
        assert "1048576 bytes, max_message_mib" in error.message
        assert len((await render(stream, "200000")).prompts[0].token_ids) == 200_000
        service.release.set()
        await waits
        assert not stream.ended


@pytest.mark.parametrize(
    "failure",
    [
        ValueError("a defect"),
        refuse(common_pb2.ERROR_CODE_OVERLOADED, "Full."),
        refuse(common_pb2.ERROR_CODE_INVALID_ARGUMENT, "What another one asked."),
    ],
    ids=["defect", "overloaded", "invalid"],
)
async def test_what_breaks_a_stream_is_no_answer_to_who_waits(failure: Exception) -> None:
    async with scripted() as (service, stub):
        service.breaks = failure
        async with stream_to(stub) as stream:
            for error in await asyncio.gather(*(error_from(stream, "1") for _ in range(3))):
                assert (error.code, error.retryable) == (common_pb2.ERROR_CODE_UNAVAILABLE, True)
            assert stream.ended


async def test_an_answer_that_the_client_may_not_receive_is_lost_to_all() -> None:
    """Who asked for it finds out with a call of its own."""
    async with scripted(max_message_mib=2) as (service, stub), stream_to(stub, max_answer_mib=2) as stream:
        waits = asyncio.create_task(error_from(stream, "wait"))
        await eventually(lambda: service.at_work == 1, "one is at work")
        assert await error_from(stream, str(300_000)) == await waits
        assert waits.result().code == common_pb2.ERROR_CODE_UNAVAILABLE
        assert stream.ended


async def test_renders_on_streams_are_calls() -> None:
    async with (
        scripted(max_calls=3) as (service, stub),
        stream_to(stub) as first,
        stream_to(stub) as second,
    ):
        # Both streams are calls themselves.
        await eventually(lambda: service.server.calls.in_flight == 2, "both streams are open")
        waits = asyncio.create_task(render(first, "wait"))
        await eventually(lambda: service.server.calls.in_flight == 3, "one is at work")
        for stream in (first, second):
            error = await error_from(stream, "1")
            assert (error.code, error.retryable) == (common_pb2.ERROR_CODE_OVERLOADED, True)
            assert "(3, max_calls)" in error.message
        # The streams are read all the same, so that who gives up makes room.
        waits.cancel()
        await eventually(lambda: service.server.calls.in_flight == 2, "it was given up")
        assert (await render(second, "1")).prompts


async def test_a_stream_that_begins_after_the_drain_did_ends_at_once() -> None:
    async with scripted() as (service, stub):
        # The gate lets it in.
        service.streams.drain()
        call = stub.RenderStream(timeout=TIMEOUT_S)
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK
        assert await service.server.drain(TIMEOUT_S)


async def test_a_defect_of_the_reader_ends_the_stream() -> None:
    async def requests() -> AsyncIterator[pb.RenderStreamRequest]:
        yield pb.RenderStreamRequest(call=1, render=completion_request("wait"))
        raise ValueError("a defect")

    async with scripted() as (service, _):
        with pytest.raises(ValueError, match="a defect"):
            async with asyncio.timeout(TIMEOUT_S):
                [answer async for answer in service.streams.serve(requests())]
        await eventually(lambda: not service.at_work, "nothing is at work")
        assert not service.server.calls.in_flight
