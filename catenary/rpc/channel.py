"""Opening a channel: options, TLS, and the metadata that each call carries."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import grpc

from catenary.addresses import UnixAddress, parse_address
from catenary.rpc.options import channel_options
from catenary.rpc.tls import TlsFiles, channel_credentials
from catenary.telemetry import current_traceparent, request_id

AUTHORIZATION = "authorization"
REQUEST_ID = "x-request-id"
TRACEPARENT = "traceparent"


def open_channel(
    target: str,
    *,
    secret: str | None,
    tls: TlsFiles | None = None,
    max_message_mib: int = 64,
    keepalive_s: float = 30,
    server_name: str | None = None,
) -> grpc.aio.Channel:
    """Open a channel to a Catenary service. It connects with the first call, and again after a loss.

    Args:
        target: `host:port`, `[ipv6]:port` or `unix:/path`.
        secret: sent with each call as a bearer token; the caller's request id and trace context go along.
        tls: files for TLS on TCP. A unix socket stays plain: it does not leave the machine.
        server_name: the host name that a TLS certificate must have, for a `target` that is an IP address.

    Raises:
        ValueError: `target` is not an address.
        StartRefused: TLS files are bad.
    """
    address = parse_address(target)
    options = channel_options(max_message_mib=max_message_mib, keepalive_s=keepalive_s)
    if tls is not None and server_name is not None:
        options = (*options, ("grpc.ssl_target_name_override", server_name))
    if isinstance(address, UnixAddress):
        inner = grpc.aio.insecure_channel(str(address), options=options)
    elif tls is None:
        inner = grpc.aio.insecure_channel(f"dns:///{address}", options=options)
    else:
        inner = grpc.aio.secure_channel(f"dns:///{address}", channel_credentials(tls), options=options)
    return _ServiceChannel(inner, secret)


class _ServiceChannel(grpc.aio.Channel):
    """A channel that adds the secret and the context to each call.

    Not made of client interceptors: those replace a stream's call object by one that passes every message
    through another queue and task, and streams are what Catenary lives on.
    """

    def __init__(self, inner: grpc.aio.Channel, secret: str | None) -> None:
        # Untyped, because the stubs' calls lack the `_registered_method` that generated code passes.
        self._inner: Any = inner
        self._secret = secret

    def _metadata(self, given: Any) -> grpc.aio.Metadata:
        metadata = grpc.aio.Metadata(*(given or ()))
        if self._secret is not None:
            metadata.add(AUTHORIZATION, f"Bearer {self._secret}")
        for key, value in ((REQUEST_ID, request_id()), (TRACEPARENT, current_traceparent())):
            if value is not None and metadata.get(key) is None:
                metadata.add(key, value)
        return metadata

    def _wrap(self, multi_callable: Callable[..., Any]) -> Any:
        def call(*args: Any, metadata: Any = None, **kwargs: Any) -> Any:
            return multi_callable(*args, metadata=self._metadata(metadata), **kwargs)

        return call

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._wrap(self._inner.unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._wrap(self._inner.unary_stream(*args, **kwargs))

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return self._wrap(self._inner.stream_unary(*args, **kwargs))

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return self._wrap(self._inner.stream_stream(*args, **kwargs))

    async def close(self, grace: float | None = None) -> None:
        await self._inner.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        state: grpc.ChannelConnectivity = self._inner.get_state(try_to_connect)
        return state

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._inner.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._inner.channel_ready()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        await self.close()
