"""Wrapping a method handler of any of the four kinds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any, Self, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from catenary.rpc.auth import Denial
from catenary.rpc.errors import refuse
from catenary.v1 import common_pb2

# Quoted: the stubs are generic, the classes are not.
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Around = Callable[[Any], AbstractAsyncContextManager[None]]
Behaviour = Callable[[Any, Any], Awaitable[Any]]

# In place of a message that cannot be read. An exception of the deserializer would become UNKNOWN, with its
# text for the caller and a traceback for the log, before any handler could say better.
CORRUPT = object()
CORRUPT_TEXT = "A message of the request cannot be read: it is not what the contract describes."


def wrap_handler(handler: Handler, around: Around) -> Handler:
    """The same handler with each call run inside of `around(context)`.

    An async-generator handler is driven here and written out, instead of being handed to gRPC as a generator:
    a call that is cancelled then closes the generator at once and in its own task, so its `finally` blocks
    run in order.

    A message that cannot be read is a refusal, raised where the handler would have got it. A peer that is
    gone when it is written to is a cancel.
    """
    attribute = ("stream" if handler.request_streaming else "unary") + (
        "_stream" if handler.response_streaming else "_unary"
    )
    behaviour: Callable[[Any, Context], Any] = getattr(handler, attribute)
    checked: Callable[[Any], Any] = _Requests if handler.request_streaming else _readable
    call = _streaming if handler.response_streaming else _single
    make = getattr(grpc, f"{attribute}_rpc_method_handler")
    made: Handler = make(
        call(behaviour, around, checked),
        request_deserializer=_lenient(handler.request_deserializer),
        response_serializer=handler.response_serializer,
    )
    return made


def _single(
    behaviour: Callable[[Any, Context], Any], around: Around, checked: Callable[[Any], Any]
) -> Behaviour:
    async def call(request: Any, context: Context) -> Any:
        async with around(context):
            answer = behaviour(checked(request), context)
            # gRPC keeps the exception of an aborted call in a cycle with its frames, this one among them: the
            # request, which may be large, would stay until the garbage collector comes by.
            del request
            return await answer

    return call


def _streaming(
    behaviour: Callable[[Any, Context], Any], around: Around, checked: Callable[[Any], Any]
) -> Behaviour:
    async def call(request: Any, context: Context) -> None:
        async with around(context):
            result = behaviour(checked(request), context)
            # See above.
            del request
            if not hasattr(result, "__aiter__"):
                await result
                return
            async with aclosing(result):
                async for message in result:
                    await _write(context, message)

    return call


async def _write(context: Context, message: Any) -> None:
    try:
        await context.write(message)
    except grpc.aio.InternalError:
        # The write failed in the transport: the peer left, and gRPC has not told this call yet.
        raise asyncio.CancelledError from None


def _lenient(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    if deserialize is None:
        return None

    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return CORRUPT

    return read


def _readable(request: Any) -> Any:
    if request is CORRUPT:
        raise refuse(common_pb2.ERROR_CODE_INVALID_ARGUMENT, CORRUPT_TEXT)
    return request


class _Requests:
    """A stream's messages."""

    def __init__(self, messages: AsyncIterator[Any]) -> None:
        self._messages = messages
        self._reading: AsyncIterator[Any] | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        if self._reading is None:
            # Not before somebody reads: gRPC makes a coroutine here, which a refused call would never await.
            self._reading = aiter(self._messages)
        return _readable(await anext(self._reading))


def denial_handler(denial: Denial, trailer: tuple[tuple[str, bytes], ...] = ()) -> Handler:
    """A handler that refuses at once: of the streaming kind, which waits for no request."""
    code, text = denial

    async def deny(_requests: Any, context: Context) -> None:
        await context.abort(code, text, trailer)

    made: Handler = grpc.stream_stream_rpc_method_handler(deny)
    return made
