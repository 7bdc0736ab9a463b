"""Wrapping a method handler of any of the four kinds."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any, TypeAlias

import grpc

from catenary.rpc.auth import Denial

# Quoted: the stubs are generic, the classes are not.
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Around = Callable[[Any], AbstractAsyncContextManager[None]]
Behaviour = Callable[[Any, Any], Awaitable[Any]]


def wrap_handler(handler: Handler, around: Around) -> Handler:
    """The same handler with each call run inside of `around(context)`.

    An async-generator handler is driven here and written out, instead of being handed to gRPC as a generator:
    a call that is cancelled then closes the generator at once and in its own task, so its `finally` blocks
    run in order.
    """
    attribute = ("stream" if handler.request_streaming else "unary") + (
        "_stream" if handler.response_streaming else "_unary"
    )
    behaviour: Callable[[Any, Context], Any] = getattr(handler, attribute)
    wrapped = _streaming(behaviour, around) if handler.response_streaming else _single(behaviour, around)
    make = getattr(grpc, f"{attribute}_rpc_method_handler")
    made: Handler = make(
        wrapped,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )
    return made


def _single(behaviour: Callable[[Any, Context], Any], around: Around) -> Behaviour:
    async def call(request: Any, context: Context) -> Any:
        async with around(context):
            return await behaviour(request, context)

    return call


def _streaming(behaviour: Callable[[Any, Context], Any], around: Around) -> Behaviour:
    async def call(request: Any, context: Context) -> None:
        async with around(context):
            result = behaviour(request, context)
            if not hasattr(result, "__aiter__"):
                await result
                return
            async with aclosing(result):
                async for message in result:
                    await context.write(message)

    return call


def denial_handler(denial: Denial, trailer: tuple[tuple[str, bytes], ...] = ()) -> Handler:
    """A handler that refuses at once: of the streaming kind, which waits for no request."""
    code, text = denial

    async def deny(_requests: Any, context: Context) -> None:
        await context.abort(code, text, trailer)

    made: Handler = grpc.stream_stream_rpc_method_handler(deny)
    return made
