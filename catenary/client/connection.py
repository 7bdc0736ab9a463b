"""The channels of a client, and how often it tries."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc

from catenary.backoff import Backoff
from catenary.rpc import RpcError, TlsFiles, error_of, open_channel
from catenary.v1 import common_pb2, router_pb2_grpc, tokenizer_pb2_grpc

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0

T = TypeVar("T")


class Connection:
    """A router and maybe a tokenizer service. Made and used inside of one event loop."""

    def __init__(
        self,
        target: str,
        *,
        secret: str | None,
        tls: TlsFiles | None,
        tokenizer: str | None,
        timeout_s: float,
        max_retries: int,
        server_name: str | None = None,
    ) -> None:
        self.timeout_s = timeout_s
        self._max_retries = max_retries
        self._target, self._tokenizer_target = target, tokenizer or ""
        self._has_secret = secret is not None
        self._channels = [open_channel(target, secret=secret, tls=tls, server_name=server_name)]
        self.router = router_pb2_grpc.RouterServiceStub(self._channels[0])
        self._text: tokenizer_pb2_grpc.TokenizerServiceAsyncStub | None = None
        if tokenizer is not None:
            channel = open_channel(tokenizer, secret=secret, tls=tls)
            self._channels.append(channel)
            self._text = tokenizer_pb2_grpc.TokenizerServiceStub(channel)

    @property
    def tokenizer(self) -> tokenizer_pb2_grpc.TokenizerServiceAsyncStub:
        """The tokenizer service. Raises ValueError if the client has no address of one."""
        if self._text is None:
            raise ValueError("this client was made without a tokenizer address")
        return self._text

    async def ask(self, call: Callable[[], Awaitable[T]]) -> T:
        """Return the router's answer to a call, repeated while it is refused for now. Raises RpcError."""
        return await self._ask(call, self.router_error)

    async def ask_tokenizer(self, call: Callable[[], Awaitable[T]]) -> T:
        """Ask the tokenizer service, as `ask` does the router."""
        return await self._ask(call, self.tokenizer_error)

    def router_error(self, failure: grpc.aio.AioRpcError) -> common_pb2.Error:
        """Return the error of a failed call. Texts of our own say which address was tried: it is the
        caller's."""
        return self._error(failure, self._target)

    def tokenizer_error(self, failure: grpc.aio.AioRpcError) -> common_pb2.Error:
        """Return the error of a failed call of the tokenizer service."""
        return self._error(failure, self._tokenizer_target)

    def _error(self, failure: grpc.aio.AioRpcError, target: str) -> common_pb2.Error:
        error = error_of(failure, at=target)
        if failure.code() is grpc.StatusCode.UNAUTHENTICATED and not self._has_secret:
            error.message += " None was given: `secret` is that of the role client."
        return error

    async def _ask(
        self, call: Callable[[], Awaitable[T]], error: Callable[[grpc.aio.AioRpcError], common_pb2.Error]
    ) -> T:
        tries = self.tries()
        while True:
            try:
                return await call()
            except grpc.aio.AioRpcError as failure:
                refusal = error(failure)
            await tries.again(refusal)

    def tries(self) -> Tries:
        """Return the tries of a new request."""
        return Tries(self._max_retries)

    async def close(self) -> None:
        """Close the channels; calls that still run are cancelled."""
        for channel in self._channels:
            await channel.close()


class Tries:
    """How often one request may still be made again."""

    def __init__(self, left: int) -> None:
        self._left = left
        self._backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)

    async def again(self, error: common_pb2.Error) -> None:
        """Wait before the next try, as long as the refusal says if it does. Raises RpcError if there is none,
        or no use in it."""
        if not error.retryable or not self._left:
            raise RpcError(error)
        self._left -= 1
        advised = error.retry_after_ms / 1000 if error.HasField("retry_after_ms") else 0.0
        await asyncio.sleep(max(min(advised, _LONGEST_PAUSE_S), self._backoff.next_delay()))
