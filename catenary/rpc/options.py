"""Every channel and server option of Catenary's gRPC links, in one place.

C-core ignores a name that it does not know, so a misspelt option is silence: the names are checked by a test
that keeps an idle connection open through many pings.
"""

from __future__ import annotations

import json

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
    """Options of a client channel. Sizes in MiB, times in seconds."""
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
    """Options of a server. Sizes in MiB, times in seconds; a connection age of 0 means no limit."""
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
