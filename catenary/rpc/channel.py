"""Open a channel to a service: every gRPC option of ours, TLS, and the metadata that each call carries.

C-core ignores a name that it does not know, so a misspelt option is silence: the names are checked by a test
that keeps an idle connection open through many pings.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import grpc

from catenary.addresses import UnixAddress, parse_address
from catenary.rpc.config import TlsFiles, channel_credentials
from catenary.telemetry import current_traceparent, request_id

MIB = 1 << 20
KEEPALIVE_TIMEOUT_MS = 10_000
# A server takes pings that come this often without calling them abuse; peers ping every 30 s by default.
MIN_PING_INTERVAL_MS = 10_000
DNS_RESOLUTION_MS = 2_000

Options = tuple[tuple[str, str | int], ...]

_PICK_FIRST = json.dumps({"loadBalancingConfig": [{"pick_first": {}}]})


def _common(max_message_mib: int, keepalive_s: float) -> Options:
    return (
        ("grpc.max_receive_message_length", max_message_mib * MIB),
        ("grpc.max_send_message_length", max_message_mib * MIB),
        ("grpc.keepalive_time_ms", max(1, int(keepalive_s * 1000))),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        # Control streams are quiet for long, and a channel between two calls must notice a dead peer as well.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    )


def channel_options(*, max_message_mib: int, keepalive_s: float) -> Options:
    """Return the options of a client channel. Sizes in MiB, times in seconds."""
    return (
        *_common(max_message_mib, keepalive_s),
        # Retries belong to the router, which knows what was emitted already.
        ("grpc.enable_retries", 0),
        ("grpc.service_config", _PICK_FIRST),
        ("grpc.service_config_disable_resolution", 1),
        ("grpc.dns_min_time_between_resolutions_ms", DNS_RESOLUTION_MS),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.min_reconnect_backoff_ms", 1_000),
        ("grpc.max_reconnect_backoff_ms", 5_000),
        # Links stay inside a deployment; an http_proxy variable meant for downloads must not catch them.
        ("grpc.enable_http_proxy", 0),
        # Two channels to one address are two connections: each has its own streams and its own fate.
        ("grpc.use_local_subchannel_pool", 1),
    )


def server_options(
    *, max_message_mib: int, max_concurrent_streams: int, keepalive_s: float, max_connection_age_s: float
) -> Options:
    """Return the options of a server. Sizes in MiB, times in seconds; a connection age of 0: no limit."""
    min_ping_ms = min(MIN_PING_INTERVAL_MS, max(1, int(keepalive_s * 500)))
    age: Options = ()
    if max_connection_age_s:
        age = (("grpc.max_connection_age_ms", int(max_connection_age_s * 1000)),)
    return (
        *_common(max_message_mib, keepalive_s),
        # The macro says MIN_RECV_PING_INTERVAL, its string does not; the macro's words are ignored.
        ("grpc.http2.min_ping_interval_without_data_ms", min_ping_ms),
        ("grpc.http2.max_ping_strikes", 2),
        ("grpc.max_concurrent_streams", max_concurrent_streams),
        # Else a second server on a port would share it in silence.
        ("grpc.so_reuseport", 0),
        *age,
    )


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
