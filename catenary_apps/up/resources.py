"""Ports and CPUs of a deployment, checked before anything starts."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping

from catenary.config import ConfigError
from catenary.cpus import Binding, Placement, Topology, format_cpus, parse_binding, place
from catenary.devices import DEVICES
from catenary.runtime import StartRefused
from catenary_apps.up.config import UpConfig

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


BIND_ENV = "CATENARY_ENGINE_CPU_BIND"
THREADS_ENV = "CATENARY_ENGINE_DEVICE_THREADS"
CORES_FOR_TWO_TOKENIZERS = 8


def cpus_of(config: UpConfig, topology: Topology, environment: Mapping[str, str]) -> Placement | None:
    """Return the CPUs of engines and services; None if no engine uses a CPU. Raises StartRefused."""
    if not DEVICES[config.device].on_host:
        return None
    binding = parse_binding(config.cpu_bind)
    if config.device == "sim" or (
        binding.auto and any(environment.get(name) for name in (BIND_ENV, THREADS_ENV))
    ):
        # Variables of the engines themselves bind them: this command leaves it to them.
        binding = Binding()
    try:
        return place(topology, config.engines * len(config.model), binding, config.cpu_reserve)
    except ValueError as error:
        raise ConfigError(f"--cpu-bind, --cpu-reserve: {error}") from None


def tokenizers_of(config: UpConfig, topology: Topology) -> int:
    """Return how many tokenizer services each model gets."""
    if config.tokenizers is not None:
        return config.tokenizers
    return 2 if min(topology.count, topology.limit) >= CORES_FOR_TWO_TOKENIZERS else 1


def described(placement: Placement) -> str:
    """Return a line with the CPUs that engines and services are bound to, empty if none is bound."""
    bound = [format_cpus(one.cpus) for one in placement.engines if one.cpus is not None]
    if not bound:
        return ""
    services = format_cpus(placement.services) if placement.services else "all"
    return f"CPUs: engines {' | '.join(bound)}; services {services}"
