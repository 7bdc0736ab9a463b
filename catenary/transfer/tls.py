"""KV between hosts, encrypted: both sides show a certificate of one authority."""

from __future__ import annotations

import errno
import socket
import ssl
from typing import ClassVar

from catenary.transfer.certificates import Certificates
from catenary.transfer.connector import BlockSource, TransferSettings
from catenary.transfer.faults import TransferError, TransferFault
from catenary.transfer.sockets import TimedSocket, transfer_errors
from catenary.transfer.tcp import TcpConnector


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

    def _dialled(self, connection: socket.socket, host: str, deadline: float) -> socket.socket:
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
            # What wraps a connection takes it over: nobody else closes it.
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
