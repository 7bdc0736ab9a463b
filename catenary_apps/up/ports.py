"""Ports are looked at before anything starts: one that is taken is one line, not four dead services."""

from __future__ import annotations

import errno
import socket

from catenary.config import ConfigError
from catenary.runtime import StartRefused

HIGHEST_PORT = 65535


def loopback_of(host: str) -> str:
    """Return an address at which this machine reaches a server that listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)


def bracketed(host: str) -> str:
    """Return the host as it is written in a URL or a gRPC target."""
    return f"[{host}]" if ":" in host else host


class PortClaims:
    """Ports that can be listened on, each given once. None stays bound: others may still take it."""

    def __init__(self) -> None:
        self._given: dict[int, str] = {}

    def claim(self, host: str, port: int, option: str) -> int:
        """Return `port` if it can be listened on, or a free one for 0. Raises StartRefused, ConfigError
        for what no other moment would mend."""
        if port in self._given:
            raise ConfigError(f"--{option}: port {port} is taken by --{self._given[port]}; choose another")
        found = _find_port(host, port, option)
        while found in self._given:
            found = _find_port(host, 0, option)
        self._given[found] = option
        return found

    def claim_range(self, host: str, port: int, count: int, option: str) -> tuple[int, ...]:
        """Return `count` ports that can be listened on: from `port` up, or free ones for 0."""
        if port and port + count - 1 > HIGHEST_PORT:
            raise ConfigError(f"--{option}: {count} ports from {port} on go beyond {HIGHEST_PORT}")
        return tuple(self.claim(host, port + index if port else 0, option) for index in range(count))


def _find_port(host: str, port: int, option: str) -> int:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            # As the servers do it, so that a port in TIME_WAIT counts as free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            return int(probe.getsockname()[1])
    except (UnicodeError, socket.gaierror):
        raise ConfigError(f"--host {host!r}: not the name or the address of a host") from None
    except OSError as error:
        reason = (
            "is in use" if error.errno == errno.EADDRINUSE else f"cannot be listened on: {error.strerror}"
        )
        raise StartRefused(f"{bracketed(host)}:{port} {reason}; choose another with --{option}") from error
