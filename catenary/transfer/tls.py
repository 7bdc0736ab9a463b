"""KV between hosts, encrypted: both sides show a certificate of one authority."""

from __future__ import annotations

import errno
import os
import socket
import ssl
import threading
from contextlib import suppress
from typing import ClassVar

from catenary.telemetry import get_logger
from catenary.transfer.connector import BlockSource, TlsPaths, TransferError, TransferFault, TransferSettings
from catenary.transfer.protocol import TimedSocket, transfer_errors
from catenary.transfer.tcp import TcpConnector

log = get_logger(__name__)


class Certificates:
    """The context of one side: of the files as they are now, looked at for each connection.

    Where renewed files do not do, or are only half there, the last ones that did go on. For any thread.
    """

    def __init__(self, paths: TlsPaths | None, *, server: bool) -> None:
        self._paths = paths
        self._server = server
        self._lock = threading.Lock()
        self._seen: list[tuple[int, ...]] = []
        self._context: ssl.SSLContext | None = None

    def context(self) -> ssl.SSLContext:
        """Return the context of a new connection. Raises OSError if the files have never done."""
        if self._paths is None:
            raise OSError("connector tls needs tls_cert, tls_key and tls_ca")
        with self._lock:
            seen = _stamps(self._paths)
            if self._context is not None and seen == self._seen:
                return self._context
            try:
                self._context = _loaded(self._paths, server=self._server)
            except OSError as error:
                if self._context is None:
                    raise
                log.warning(
                    "the renewed certificates for KV do not do; the ones before go on", reason=str(error)
                )
            self._seen = seen
            return self._context


def _loaded(paths: TlsPaths, *, server: bool) -> ssl.SSLContext:
    """Raise OSError for files that do not do, or are not there."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(paths.cert, paths.key, password="")
    context.load_verify_locations(paths.ca)
    return context


def _stamps(paths: TlsPaths) -> list[tuple[int, ...]]:
    """Return values that change when a file is written anew or replaced."""
    stamps: list[tuple[int, ...]] = []
    for path in (paths.cert, paths.key, paths.ca):
        found: tuple[int, ...] = ()
        with suppress(OSError):
            status = os.stat(path)
            found = (status.st_mtime_ns, status.st_ino, status.st_size)
        stamps.append(found)
    return stamps


class TlsConnector(TcpConnector):
    """The tcp connector's words within TLS, under the certificate that the engine dials routers with. The
    offering engine's has to be for the host of its address."""

    name: ClassVar[str] = "tls"

    def __init__(self, settings: TransferSettings) -> None:
        super().__init__(settings)
        self._offering = Certificates(settings.tls, server=True)
        self._fetching = Certificates(settings.tls, server=False)

    def serve(self, source: BlockSource) -> str:
        # What does not do is to be known at the start.
        self._offering.context()
        self.wrap = self._accepted
        return super().serve(source)

    def _accepted(self, connection: socket.socket) -> socket.socket:
        # The handshake comes with the first words, in the connection's own thread.
        context = self._offering.context()
        return context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)

    def wrapped(self, connection: socket.socket, host: str, deadline: float) -> socket.socket:
        try:
            context = self._fetching.context()
        except OSError:
            raise TransferError(TransferFault.CONNECTOR, "there is no certificate to fetch KV with") from None
        made: socket.socket = connection
        try:
            with transfer_errors():
                wrapped = context.wrap_socket(connection, server_hostname=host, do_handshake_on_connect=False)
                made = wrapped
                TimedSocket(made, deadline).arm()
                wrapped.do_handshake()
        except BaseException as error:
            # The wrapper takes the connection over: it alone closes it.
            made.close()
            if isinstance(error, ValueError):
                raise TransferError(TransferFault.UNREACHABLE, "the offer's host is no name") from None
            if isinstance(error, TransferError) and _left(error.__context__):
                raise TransferError(TransferFault.BUSY, "the peer closed the connection at once") from None
            raise
        return made


def _left(error: BaseException | None) -> bool:
    """Whether the peer was gone before the handshake: as a server without room is, before it is asked."""
    gone = isinstance(error, OSError) and error.errno == errno.ENOTCONN
    return gone or isinstance(error, ssl.SSLEOFError | ConnectionError)
