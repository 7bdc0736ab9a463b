"""A service's gRPC server: listening, the health of what it serves, and an ordered end."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import REGISTRY

from catenary.addresses import Address, TcpAddress, UnixAddress, parse_address
from catenary.config import ConfigError
from catenary.rpc.auth import HEALTH_SERVICE, Authorizer, Role
from catenary.rpc.calls import CallCount
from catenary.rpc.channel import server_options
from catenary.rpc.config import RpcConfig, Secrets, TlsFiles, server_credentials
from catenary.rpc.exposition import MetricsServer
from catenary.rpc.health import LIVENESS, HealthBoard, HealthServicer
from catenary.rpc.interceptor import CallGate
from catenary.runtime import StartRefused
from catenary.telemetry import get_logger


class AddressInUse(StartRefused):
    """Another process listens at the address."""

    def __init__(self, address: str) -> None:
        super().__init__(f"cannot listen on {address}: the address is in use")
        self.address = address


async def prepare(address: Address) -> None:
    """Check that the address can be bound; remove a socket file on which no process listens any more.

    gRPC reports a failed bind with several lines of its own and no reason, so the check comes first.

    Raises:
        AddressInUse: another process listens there.
        StartRefused: it cannot be bound for another reason.
    """
    if isinstance(address, TcpAddress):
        await _prepare_tcp(address)
    else:
        await asyncio.to_thread(_prepare_unix, address)


async def _prepare_tcp(address: TcpAddress) -> None:
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise ConfigError(f"cannot listen on {address}: {error.strerror or 'the host is unknown'}") from None
    for family, kind, protocol, _, sockaddr in found:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                probe.bind(sockaddr)
                # Binding alone succeeds even if another socket is bound that does not listen yet.
                probe.listen(1)
            except OSError as error:
                raise _bind_error(address, error) from None


def _prepare_unix(address: UnixAddress) -> None:
    path = address.path
    try:
        _make_private_directory(path.parent)
        mode = os.lstat(path).st_mode if os.path.lexists(path) else None
    except OSError as error:
        raise _bind_error(address, error) from None
    if mode is None:
        return
    if not stat.S_ISSOCK(mode):
        raise StartRefused(f"cannot listen on {address}: the path exists and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            with suppress(FileNotFoundError):
                path.unlink()
            return
        except OSError as error:
            # A full backlog or no permission: alive, or not ours to remove.
            if error.errno in (errno.EACCES, errno.EPERM):
                raise _bind_error(address, error) from None
    raise AddressInUse(str(address))


def _make_private_directory(directory: Path) -> None:
    if not directory.exists():
        directory.mkdir(mode=0o700, parents=True)
        # mkdir's mode passes through the umask.
        directory.chmod(0o700)


def _bind_error(address: Address, error: OSError) -> StartRefused:
    if error.errno == errno.EADDRINUSE:
        return AddressInUse(str(address))
    return StartRefused(f"cannot listen on {address}: {error.strerror or 'it cannot be bound'}")


def socket_identity(path: Path) -> tuple[int, int] | None:
    """Return device and inode of a socket file, to remove at the end only the file that this process made."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


log = get_logger(__name__)


class RpcServer:
    """Built inside of the running loop; servicers are added to `grpc` before `start`.

    Args:
        listen: addresses to listen on.
        secrets: what callers must show. Without any there must be `insecure` or required client certificates.
        access: full method prefix ("/catenary.v1.FleetService/") to the roles that may call it.
        metrics: host and port of a Prometheus page, or None.

    Raises:
        StartRefused: nothing protects the server and `insecure` is not set, or the TLS files are bad.
    """

    def __init__(
        self,
        *,
        listen: Sequence[str],
        secrets: Secrets,
        insecure: bool,
        access: Mapping[str, frozenset[Role]],
        tls: TlsFiles | None = None,
        max_message_mib: int = 64,
        max_concurrent_streams: int = 1024,
        max_calls: int = 4096,
        keepalive_s: float = 30,
        max_connection_age_s: float = 0,
        metrics: tuple[str, int] | None = None,
    ) -> None:
        mutual = tls is not None and tls.require_client_cert
        if secrets.client is None and secrets.engine is None and not mutual and not insecure:
            raise ConfigError(
                "no secret is set: give client_secret_file and engine_secret_file, or insecure to serve all"
            )
        self._addresses = [parse_address(text) for text in listen]
        self._credentials = None if tls is None else server_credentials(tls)
        authorizer = Authorizer(secrets, access, insecure=insecure, certificates=mutual)
        self.calls = CallCount(max_calls)
        """Those that run, without health and reflection. What a stream carries may be counted as well."""
        self._gate = CallGate(authorizer, self.calls)
        self._services = [prefix.strip("/") for prefix in access]
        self._metrics_at = metrics
        self._metrics_server: MetricsServer | None = None
        self._sockets: dict[Path, tuple[int, int] | None] = {}
        self.health = HealthBoard(self._services)
        self.grpc = grpc.aio.server(
            interceptors=[self._gate],
            options=server_options(
                max_message_mib=max_message_mib,
                max_concurrent_streams=max_concurrent_streams,
                keepalive_s=keepalive_s,
                max_connection_age_s=max_connection_age_s,
            ),
        )
        health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(self.health), self.grpc)

    @classmethod
    def from_config(cls, config: RpcConfig, access: Mapping[str, frozenset[Role]]) -> Self:
        """Return a server with a service's options."""
        return cls(
            listen=config.listen,
            secrets=config.secrets(),
            insecure=config.insecure,
            access=access,
            tls=config.tls(),
            max_message_mib=config.max_message_mib,
            max_concurrent_streams=config.max_concurrent_streams,
            max_calls=config.max_calls,
            keepalive_s=config.keepalive_s,
            max_connection_age_s=config.max_connection_age_s,
            metrics=(config.metrics_host, config.metrics_port) if config.metrics_port else None,
        )

    async def start(self) -> tuple[str, ...]:
        """Listen. Returns the addresses in order, with real ports, as `open_channel` takes them.

        The process is live from now on; each service is ready when `health.set` says so.

        Raises:
            AddressInUse: another process listens on one of the addresses.
            StartRefused: one cannot be bound for another reason.
        """
        names = [*self._services, HEALTH_SERVICE, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, self.grpc)
        try:
            bound = [await self._bind(address) for address in self._addresses]
            if self._metrics_at is not None:
                await self._start_metrics(*self._metrics_at)
        except StartRefused:
            await self._release()
            raise
        await self.grpc.start()
        self.health.set(LIVENESS, True)
        log.info("listening", addresses=[str(address) for address in bound])
        return tuple(str(address) for address in bound)

    def begin_drain(self) -> None:
        """Make every service NOT_SERVING for good and refuse new calls with UNAVAILABLE. Running calls
        continue."""
        if not self._gate.draining:
            self._gate.draining = True
            self.health.pin()
            log.info("draining", calls=self.calls.in_flight)

    async def drain(self, grace_s: float) -> bool:
        """Begin to drain, wait for running calls; whether all ended within `grace_s` seconds."""
        self.begin_drain()
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await self.calls.wait_idle()
        return self.calls.in_flight == 0

    async def stop(self, grace_s: float = 0) -> None:
        """End: calls that still run after `grace_s` seconds are cancelled. May be called twice."""
        self.begin_drain()
        self.health.close()
        await self.grpc.stop(grace_s)
        await self._release()

    async def _release(self) -> None:
        if self._metrics_server is not None:
            await self._metrics_server.stop()
        for path, identity in self._sockets.items():
            if identity is not None and socket_identity(path) == identity:
                path.unlink(missing_ok=True)

    async def _bind(self, address: Address) -> Address:
        await prepare(address)
        try:
            if self._credentials is None or isinstance(address, UnixAddress):
                port = self.grpc.add_insecure_port(str(address))
            else:
                port = self.grpc.add_secure_port(str(address), self._credentials)
        except RuntimeError:
            # The check before passed, so the address was taken in between, or gRPC knows better.
            raise AddressInUse(str(address)) from None
        if isinstance(address, UnixAddress):
            self._sockets[address.path] = socket_identity(address.path)
            return address
        return TcpAddress(address.host, port)

    async def _start_metrics(self, host: str, port: int) -> None:
        self._metrics_server = MetricsServer(REGISTRY)
        try:
            await self._metrics_server.start(host, port)
        except OSError as error:
            raise StartRefused(f"metrics cannot listen on {host}:{port}: {error.strerror or error}") from None
