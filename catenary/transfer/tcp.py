"""KV between hosts, in the clear: for a network of engines alone. See tls.py for others."""

from __future__ import annotations

import mmap
import socket
import time
from collections.abc import Callable
from typing import ClassVar

from catenary.addresses import TcpAddress, parse_address
from catenary.transfer.connector import (
    DIGEST_BYTES,
    BlockSource,
    Connector,
    Fetch,
    Put,
    TransferError,
    TransferFault,
    TransferSettings,
)
from catenary.transfer.protocol import TimedSocket, fetch_blocks
from catenary.transfer.serving import OfferServer


class TcpConnector(Connector):
    """Sends each block behind its checksum."""

    name: ClassVar[str] = "tcp"
    # Of connections that come: see OfferServer.
    wrap: Callable[[socket.socket], socket.socket] | None = None

    def __init__(self, settings: TransferSettings) -> None:
        super().__init__(settings)
        self.server: OfferServer | None = None

    def serve(self, source: BlockSource) -> str:
        listen = _host_and_port(self.settings.listen)
        family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
        listener = socket.create_server((listen.host, listen.port), family=family)
        bound = listener.getsockname()[1]
        self.server = OfferServer(
            listener,
            source,
            send_chunk,
            timeout_s=self.settings.timeout_s,
            max_transfers=self.settings.max_transfers,
            wrap=self.wrap,
        )
        shown = _host_and_port(self.settings.advertise or self.settings.listen)
        return str(TcpAddress(shown.host, shown.port or bound))

    def fetch(self, fetch: Fetch, put: Put) -> None:
        left = fetch.deadline - time.monotonic()
        try:
            address = _host_and_port(fetch.address)
            dialled = socket.create_connection((address.host, address.port), timeout=max(left, 0.001))
        except (OSError, ValueError):
            raise TransferError(TransferFault.UNREACHABLE, "nobody answers at the offer's address") from None
        dialled.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with dialled, self.wrapped(dialled, address.host, fetch.deadline) as connection:
            fetch_blocks(connection, fetch, _receive_chunk, put)

    def close(self) -> None:
        if self.server is not None:
            self.server.close()

    def wrapped(self, connection: socket.socket, host: str, deadline: float) -> socket.socket:
        """Return the socket to speak on, for a connection to `host`; may wait for the peer. Raises
        TransferError."""
        return connection


def _host_and_port(text: str) -> TcpAddress:
    """Return host and port of an address. Raises ValueError."""
    address = parse_address(text)
    if not isinstance(address, TcpAddress):
        raise ValueError("not HOST:PORT")
    return address


def send_chunk(sock: TimedSocket, digests: list[bytes], blocks: memoryview) -> None:
    size = len(blocks) // len(digests)
    for at, digest in enumerate(digests):
        sock.send(digest)
        sock.send(blocks[at * size : (at + 1) * size])


def _receive_chunk(sock: TimedSocket, count: int, size: int) -> tuple[list[bytes], memoryview]:
    # All of it is written before it is read: a bytearray's zeros would take as long as a copy.
    digests, blocks = [], memoryview(mmap.mmap(-1, count * size))
    for at in range(count):
        digests.append(sock.receive(DIGEST_BYTES))
        sock.receive_into(blocks[at * size : (at + 1) * size])
    return digests, blocks
