"""uvicorn inside our own event loop, shut down in our own order."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import uvicorn
from starlette.datastructures import Headers
from starlette.types import ASGIApp

from catenary.config import ConfigError
from catenary.runtime import StartRefused
from gateway.http.answers import Fields
from gateway.http.protocol import HttpLimits, LimitedHttpProtocol, limited_protocol

BACKLOG = 2048


_DATE_S = 1.0
_GRACE_S = 5.0
_POLL_S = 0.005


class _PromptServer(uvicorn.Server):
    """Server that stops at once: uvicorn's own looks every 0.1 s, and waits as long again."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._told = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave the signals to catenary.runtime."""
        yield

    def tell(self) -> None:
        """End `serve` in good order."""
        self.should_exit = True
        self._told.set()

    async def main_loop(self) -> None:
        """Renew the date header until the server is told to stop."""
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._told.wait(), _DATE_S)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, close idle connections, wait a moment for the others."""
        for server in self.servers:
            server.close()
        state = self.server_state
        for connection in list(state.connections):
            connection.shutdown()
        deadline = asyncio.get_running_loop().time() + _GRACE_S
        while state.connections or state.tasks:
            if asyncio.get_running_loop().time() > deadline:
                break
            await asyncio.sleep(_POLL_S)
        for task in state.tasks:
            task.cancel()


class HttpServer:
    """Listening socket with the ASGI application behind it."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        host: str,
        port: int,
        limits: HttpLimits,
        keep_alive_s: int,
        certfile: Path | None = None,
        keyfile: Path | None = None,
        client_ca: Path | None = None,
        refusal_fields: Callable[[Headers], Fields] | None = None,
    ) -> None:
        """Make one, not listening yet. Raises StartRefused for TLS files that cannot be used.

        Args:
            app: the application.
            host: address to listen on.
            port: port to listen on; 0 takes a free one.
            limits: of its connections.
            keep_alive_s: seconds that an idle connection is kept.
            certfile: certificate chain for HTTPS.
            keyfile: its private key.
            client_ca: CA of client certificates, which are then required.
            refusal_fields: further headers, by a request's, of an answer that is sent before `app` sees it.
        """
        context = None if certfile is None or keyfile is None else _tls_context(certfile, keyfile, client_ca)
        self._host = host
        self._port = port
        self._scheme = "http" if context is None else "https"
        self._socket: socket.socket | None = None
        self._task: asyncio.Task[None] | None = None
        self._protocol = limited_protocol(limits, refusal_fields)
        self._server = _PromptServer(
            uvicorn.Config(
                app,
                http=self._protocol,
                loop="none",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=BACKLOG,
                timeout_keep_alive=keep_alive_s,
                ssl_context_factory=None if context is None else lambda _config, _default: context,
            )
        )

    @property
    def connections(self) -> int:
        return len(self._server.server_state.connections)

    async def start(self) -> str:
        """Listen, and return the base URL. Raises StartRefused: port in use, bad host."""
        self._socket = _bind(self._host, self._port)
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not self._server.started:
            if self._task.done():
                await self._task
                raise StartRefused(f"--host {self._host}: the HTTP server did not start")
            await asyncio.sleep(_POLL_S)
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{self._scheme}://{host}:{self._socket.getsockname()[1]}"

    def leave(self) -> None:
        """End each connection with its next answer, which announces that, and go on listening."""
        self._protocol.leaving = True
        for connection in list(self._server.server_state.connections):
            if isinstance(connection, LimitedHttpProtocol):
                connection.leave()

    def close_connections(self) -> None:
        """Close idle connections, and each other one with its answer."""
        for connection in list(self._server.server_state.connections):
            if isinstance(connection, LimitedHttpProtocol):
                connection.close()

    async def stop(self) -> None:
        """Stop listening, wait a moment for answers that are being written, close all connections."""
        if self._task is None:
            return
        self._server.tell()
        await asyncio.wait({self._task})
        if self._socket is not None:
            self._socket.close()


def _tls_context(certfile: Path, keyfile: Path, client_ca: Path | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without a password OpenSSL would ask the terminal for that of an encrypted key.
        context.load_cert_chain(certfile, keyfile, password="")
    except (OSError, ValueError):
        raise ConfigError(
            "--ssl-certfile, --ssl-keyfile: not a readable certificate and its key without a password"
        ) from None
    if client_ca is not None:
        try:
            context.load_verify_locations(client_ca)
        except OSError:
            raise ConfigError(f"--ssl-ca-certs {client_ca}: holds no readable certificate") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _bind(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        raise ConfigError(f"--host {host}: not an address of this machine") from None
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        reason = "is in use" if error.errno == errno.EADDRINUSE else "cannot be listened on"
        raise StartRefused(f"--port {port}: {host}:{port} {reason}") from None
    listener.setblocking(False)
    return listener
