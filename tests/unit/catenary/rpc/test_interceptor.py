"""Wrapped handlers over transports that fail: moments too short to be met by chance."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from catenary.rpc import RpcError
from catenary.rpc.interceptor import told_statuses, wrap_handler
from catenary.v1 import common_pb2, router_pb2


class GoneContext:
    """A call whose peer has just left: gRPC fails its operations and does not know it as done yet."""

    def done(self) -> bool:
        return False

    async def write(self, message: Any) -> None:
        raise grpc.aio.InternalError("Failed grpc_call_start_batch: write")

    async def abort(self, *args: Any) -> None:
        raise grpc.aio.InternalError("Failed grpc_call_start_batch: status")


@asynccontextmanager
async def statuses(context: Any) -> AsyncIterator[None]:
    async with told_statuses(context, "/x/y"):
        yield


async def call(behaviour: Any) -> None:
    handler: Any = grpc.unary_stream_rpc_method_handler(
        behaviour, request_deserializer=router_pb2.GenerateRequest.FromString
    )
    wrapped: Any = wrap_handler(handler, statuses)
    await wrapped.unary_stream(router_pb2.GenerateRequest(), GoneContext())


async def test_a_peer_that_is_gone_when_it_is_written_to_is_a_cancel() -> None:
    closed = []

    async def generate(request: Any, context: Any) -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            closed.append(True)

    async def writes(request: Any, context: Any) -> None:
        await context.write(1)

    for behaviour in (generate, writes):
        with pytest.raises(asyncio.CancelledError):
            await call(behaviour)
    assert closed == [True]


@pytest.mark.parametrize(
    "failure", [RpcError(common_pb2.Error(code=common_pb2.ERROR_CODE_OVERLOADED)), ValueError("defect")]
)
async def test_a_peer_that_is_gone_when_it_is_refused_is_a_cancel(failure: Exception) -> None:
    async def fail(request: Any, context: Any) -> None:
        raise failure

    with pytest.raises(asyncio.CancelledError):
        await call(fail)
