"""Ports are looked at before anything starts: one that is taken is one line, not four dead services."""

from __future__ import annotations

import errno
import socket

from catenary.runtime import StartRefused


def loopback_of(host: str) -> str:
    """Return an address at which this machine reaches a server that listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)


def bracketed(host: str) -> str:
    """Return the host as it is written in a URL or a gRPC target."""
    return f"[{host}]" if ":" in host else host


def claim_port(host: str, port: int, option: str) -> int:
    """Return `port` if it can be listened on, or a free one for 0.

    Raises StartRefused naming the option. Nothing stays bound, so another program may still take the port.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            # As the servers do it, so that a port in TIME_WAIT counts as free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            return int(probe.getsockname()[1])
    except OSError as error:
        reason = (
            "is in use" if error.errno == errno.EADDRINUSE else f"cannot be listened on: {error.strerror}"
        )
        raise StartRefused(f"{bracketed(host)}:{port} {reason}; choose another with --{option}") from error


def claim_ports(host: str, port: int, count: int, option: str) -> tuple[int, ...]:
    """Return `count` ports that can be listened on: from `port` up, or free ones for 0."""
    return tuple(claim_port(host, port + index if port else 0, option) for index in range(count))
