"""KV between hosts, encrypted: both sides show a certificate of one authority."""

from __future__ import annotations

import socket
import ssl
from functools import cached_property, partial
from typing import ClassVar

from services.engine.transfer.connector import BlockSource, TlsPaths
from services.engine.transfer.faults import TransferError, TransferFault
from services.engine.transfer.sockets import TimedSocket, transfer_errors
from services.engine.transfer.tcp import TcpConnector


class TlsConnector(TcpConnector):
    """The tcp connector's words within TLS, under the certificate that the engine dials routers with. The
    offering engine's has to be for the host of its address."""

    name: ClassVar[str] = "tls"

    def serve(self, source: BlockSource) -> str:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        # The handshake comes with the first words, in the connection's own thread.
        self.wrap = partial(
            _loaded(context, self.settings.tls).wrap_socket, server_side=True, do_handshake_on_connect=False
        )
        return super().serve(source)

    def _dialled(self, connection: socket.socket, host: str, deadline: float) -> socket.socket:
        try:
            context = self._fetching
        except OSError:
            raise TransferError(TransferFault.CONNECTOR, "there is no certificate to fetch KV with") from None
        made = context.wrap_socket(connection, server_hostname=host, do_handshake_on_connect=False)
        try:
            TimedSocket(made, deadline).arm()
            with transfer_errors():
                made.do_handshake()
        except TransferError as error:
            made.close()
            if isinstance(error.__context__, ssl.SSLEOFError | ConnectionError):
                # A server without room has left before it is asked.
                raise TransferError(TransferFault.BUSY, "the peer closed the connection at once") from None
            raise
        return made

    @cached_property
    def _fetching(self) -> ssl.SSLContext:
        return _loaded(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), self.settings.tls)


def _loaded(context: ssl.SSLContext, paths: TlsPaths | None) -> ssl.SSLContext:
    """Raises OSError for files that do not do, or are not there."""
    if paths is None:
        raise OSError("connector tls needs tls_cert, tls_key and tls_ca")
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(paths.cert, paths.key, password="")
    context.load_verify_locations(paths.ca)
    return context
