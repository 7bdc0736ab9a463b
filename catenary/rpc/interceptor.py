"""Surround every call of a server: authorization, limits, request context, metrics, status codes."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, nullcontext
from typing import Any, Self, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from catenary.rpc.auth import HEALTH_SERVICE, REFLECTION_SERVICE, Authorizer, Denial
from catenary.rpc.calls import HANDLED, UNKNOWN_METHOD, CallCount, recorded
from catenary.rpc.channel import REQUEST_ID, TRACEPARENT
from catenary.rpc.errors import ERROR_TRAILER, INTERNAL_TEXT, RpcError, refuse
from catenary.telemetry import get_logger
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
    """Return the same handler with each call run inside of `around(context)`.

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
            # Not before the stream is read: gRPC makes a coroutine, which a refused call would never await.
            self._reading = aiter(self._messages)
        return _readable(await anext(self._reading))


def denial_handler(denial: Denial, trailer: tuple[tuple[str, bytes], ...] = ()) -> Handler:
    """Return a handler that refuses at once: of the streaming kind, which waits for no request."""
    code, text = denial

    async def deny(_requests: Any, context: Context) -> None:
        await context.abort(code, text, trailer)

    made: Handler = grpc.stream_stream_rpc_method_handler(deny)
    return made


log = get_logger(__name__)

DENIAL_LOG_SECONDS = 1.0

# Operators look at a draining server too, and their streams do not hold up its end.
_UNCOUNTED = (f"/{HEALTH_SERVICE}/", f"/{REFLECTION_SERVICE}/")

_DRAINING = refuse(
    common_pb2.ERROR_CODE_DRAINING,
    "The service is shutting down and takes no new calls.",
    retryable=True,
    retry_after_ms=1000,
)


class CallGate(grpc.aio.ServerInterceptor):
    """The one interceptor of a server. It refuses calls beyond the most of `calls`, and all once it drains.

    Health and reflection are not counted: they answer under any load.
    """

    def __init__(self, authorizer: Authorizer, calls: CallCount) -> None:
        self._authorizer = authorizer
        self._calls = calls
        self.draining = False
        self._quiet_until = 0.0

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        method = handler_call_details.method
        metadata = tuple(handler_call_details.invocation_metadata or ())
        handler = await continuation(handler_call_details)
        label = UNKNOWN_METHOD if handler is None else method
        counted = not method.startswith(_UNCOUNTED)
        if denial := self._authorizer.deny(method, metadata):
            self._report(label, denial)
            handler, counted = denial_handler(denial), False
        elif handler is None:
            HANDLED.labels(label, grpc.StatusCode.UNIMPLEMENTED.name).inc()
            return None
        elif self.draining and counted:
            handler, counted = _refusing_handler(_DRAINING), False
        elif counted:
            try:
                self._calls.check()
            except RpcError as full:
                handler, counted = _refusing_handler(full), False
        # A stream of messages lives as long as its client and belongs to no request.
        spanned = counted and not handler.request_streaming
        return wrap_handler(
            handler, lambda context: self._around(context, method, label, metadata, counted, spanned)
        )

    def _report(self, label: str, denial: Denial) -> None:
        """Log a denied call, one a second: the metric counts them all, and a flood must not fill the log."""
        now = time.monotonic()
        if now >= self._quiet_until:
            self._quiet_until = now + DENIAL_LOG_SECONDS
            log.warning("call denied", method=label, code=denial[0].name)

    @asynccontextmanager
    async def _around(
        self,
        context: Context,
        method: str,
        label: str,
        metadata: tuple[tuple[str, str | bytes], ...],
        counted: bool,
        spanned: bool,
    ) -> AsyncIterator[None]:
        found = {key: value for key, value in metadata if isinstance(value, str)}
        with (
            self._calls.one() if counted else nullcontext(),
            recorded(
                method, found.get(REQUEST_ID, ""), found.get(TRACEPARENT), label=label, spanned=spanned
            ) as record,
        ):
            try:
                if denial := self._authorizer.deny_certificate(method, context.auth_context()):
                    await context.abort(*denial)
                async with told_statuses(context, method):
                    yield
                record.code = _code_of(context)
            except grpc.aio.AbortError:
                record.code = _code_of(context)
                raise


@asynccontextmanager
async def told_statuses(context: Context, method: str) -> AsyncIterator[None]:
    """Turn a refusal into its status and trailer; log a defect, which becomes INTERNAL with a fixed text."""
    try:
        yield
    except grpc.aio.AbortError:
        raise
    except RpcError as refusal:
        error = refusal.error
        _clear_frames(refusal)
        await _abort(context, refusal.status, error)
    except grpc.aio.InternalError:
        # The transport failed a read or a write: the peer left.
        raise asyncio.CancelledError from None
    except grpc.aio.UsageError:
        if not context.done():
            raise
        # The peer left between two writes.
        raise asyncio.CancelledError from None
    except Exception as defect:
        log.exception("call failed", method=method)
        _clear_frames(defect)
        error = common_pb2.Error(code=common_pb2.ERROR_CODE_INTERNAL, message=INTERNAL_TEXT)
        await _abort(context, grpc.StatusCode.INTERNAL, error)


def _clear_frames(failure: BaseException) -> None:
    """Let go of what the handler held, the request above all.

    The exception that ends the call refers to `failure`, and gRPC keeps it in a cycle with the call: without
    this, a flood of large requests that are refused stays in memory until the garbage collector comes by.
    """
    link: BaseException | None = failure
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__context__


async def _abort(context: Context, status: grpc.StatusCode, error: common_pb2.Error) -> None:
    """End the call with `error`. Always raises, for a peer that is gone CancelledError."""
    try:
        await context.abort(status, error.message, ((ERROR_TRAILER, error.SerializeToString()),))
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None


def _code_of(context: Context) -> grpc.StatusCode:
    """Return the status of the call; OK if none was set. gRPC keeps a number or an enum member."""
    code: Any = context.code()
    if isinstance(code, grpc.StatusCode):
        return code
    return next((status for status in grpc.StatusCode if status.value[0] == code), grpc.StatusCode.OK)


def _refusing_handler(refusal: RpcError) -> Handler:
    trailer = ((ERROR_TRAILER, refusal.error.SerializeToString()),)
    return denial_handler((refusal.status, refusal.error.message), trailer)
