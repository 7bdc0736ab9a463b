"""The protocol of the connectors of this package: its bytes, and the part of either side.

    server    greeting   magic, version, nonce[16]
    client    request    magic, kind, name[16], binding[16], layout[16], first, count, proof[16]
    server    reply      magic, status, block_bytes, count
    server    chunks     as the connector has it: per block a checksum[16] and the block
    client    thanks     one byte, once all blocks are there and right

Everything has a fixed length, numbers are little-endian, and no side takes a length from the other that it
did not ask for. The proof covers the nonce, so a request cannot be played again.
"""

from __future__ import annotations

import secrets
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Protocol

from catenary.frames import LinkClosed, fill
from catenary.transfer.connector import (
    DIGEST_BYTES,
    Checksums,
    Fetch,
    Put,
    TransferError,
    TransferFault,
    equal,
    name_of,
    sign,
)


@contextmanager
def transfer_errors() -> Iterator[None]:
    """Make a socket's errors TransferErrors."""
    try:
        yield
    except TimeoutError:
        raise TransferError(TransferFault.TIMEOUT, "the transfer took too long") from None
    except LinkClosed:
        raise TransferError(TransferFault.PROTOCOL, "the peer closed the connection") from None
    except OSError as error:
        raise TransferError(TransferFault.PROTOCOL, f"the connection broke: {error.strerror}") from None


class TimedSocket:
    """A connected socket that raises TransferError, and TIMEOUT from `deadline` (time.monotonic()) on."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self.socket = sock
        self.deadline = deadline

    def arm(self) -> None:
        """Give the next call what is left of the time. Raises TransferError."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TransferError(TransferFault.TIMEOUT, "the transfer took too long")
        self.socket.settimeout(left)

    def send(self, data: bytes | memoryview) -> None:
        """Send all of it."""
        view = memoryview(data)
        with transfer_errors():
            while view:
                self.arm()
                view = view[self.socket.send(view) :]

    def receive(self, count: int) -> bytes:
        """Receive exactly `count` bytes."""
        data = bytearray(count)
        self.receive_into(memoryview(data))
        return bytes(data)

    def receive_into(self, view: memoryview) -> None:
        """Fill the view."""
        with transfer_errors():
            fill(view, self._receive_into)

    def _receive_into(self, view: memoryview) -> int:
        self.arm()
        return self.socket.recv_into(view)


MAGIC: Final = b"CtKv"
VERSION: Final = 1
THANKS: Final = b"\x06"

_GREETING: Final = struct.Struct("<4sH16s")
_REQUEST: Final = struct.Struct("<4sH16s16s16sII")
_REPLY: Final = struct.Struct("<4sHII")

GREETING_BYTES: Final = _GREETING.size
REQUEST_BYTES: Final = _REQUEST.size + DIGEST_BYTES
REPLY_BYTES: Final = _REPLY.size


class Kind(IntEnum):
    """The purpose of a request: to fetch blocks, or to give the offer back."""

    FETCH = 1
    GIVE_BACK = 2


class Status(IntEnum):
    """The server's answer. What is behind GONE, a late or a wrong ticket, it does not tell."""

    OK = 0
    GONE = 1
    LAYOUT = 2
    MISMATCH = 3
    BUSY = 4


_FAULTS: Final = {
    Status.GONE: TransferFault.GONE,
    Status.LAYOUT: TransferFault.LAYOUT,
    Status.MISMATCH: TransferFault.MISMATCH,
    Status.BUSY: TransferFault.BUSY,
}


@dataclass(frozen=True, slots=True)
class Request:
    """A request as the server reads it. `proof` covers the nonce and `body`."""

    kind: Kind
    name: bytes
    binding: bytes
    layout: bytes
    first: int
    count: int
    body: bytes
    proof: bytes


def new_greeting() -> tuple[bytes, bytes]:
    """Return the server's first bytes, and the nonce in them."""
    nonce = secrets.token_bytes(16)
    return _GREETING.pack(MAGIC, VERSION, nonce), nonce


def read_greeting(data: bytes) -> bytes:
    """Return the nonce. Raises TransferError."""
    magic, version, nonce = _GREETING.unpack(data)
    if magic != MAGIC or version != VERSION:
        raise TransferError(TransferFault.PROTOCOL, "the peer does not speak this version of the protocol")
    return bytes(nonce)


def make_request(fetch: Fetch, nonce: bytes) -> bytes:
    """Return the client's request for blocks, or to give the offer back."""
    kind = Kind.FETCH if fetch.count else Kind.GIVE_BACK
    body = _REQUEST.pack(
        MAGIC, kind, name_of(fetch.ticket), fetch.binding, fetch.layout, fetch.first, fetch.count
    )
    return body + sign(fetch.ticket, nonce, body)


def read_request(data: bytes) -> Request:
    """Raise TransferError for what is no request."""
    body, proof = data[: _REQUEST.size], data[_REQUEST.size :]
    magic, kind, name, binding, layout, first, count = _REQUEST.unpack(body)
    if magic != MAGIC or kind not in tuple(Kind):
        raise TransferError(TransferFault.PROTOCOL, "what came is no request")
    return Request(Kind(kind), name, binding, layout, first, count, body, proof)


def make_reply(status: Status, block_bytes: int = 0, count: int = 0) -> bytes:
    """Return the server's reply."""
    return _REPLY.pack(MAGIC, status, block_bytes, count)


def check_reply(data: bytes, fetch: Fetch) -> None:
    """Raise TransferError unless the server gives just what was asked for."""
    magic, status, block_bytes, count = _REPLY.unpack(data)
    if magic != MAGIC or status not in tuple(Status):
        raise TransferError(TransferFault.PROTOCOL, "what came is no reply")
    if status != Status.OK:
        raise TransferError(_FAULTS[Status(status)], f"the offering engine answers {Status(status).name}")
    if count != fetch.count or (count and block_bytes != fetch.block_bytes):
        raise TransferError(TransferFault.PROTOCOL, "the offering engine announces other blocks")


class ReceiveChunk(Protocol):
    """Receives `count` blocks of `size` bytes: their checksums, and the blocks."""

    def __call__(self, sock: TimedSocket, count: int, size: int) -> tuple[list[bytes], memoryview]: ...


def fetch_blocks(connection: socket.socket, fetch: Fetch, receive_chunk: ReceiveChunk, put: Put) -> None:
    """Speak the protocol on a connection, which is the caller's to close.

    Raises TransferError, and what `put` raises. What `put` gets has the right checksums.
    """
    sock = TimedSocket(connection, fetch.deadline)
    nonce = read_greeting(sock.receive(GREETING_BYTES))
    try:
        sock.send(make_request(fetch, nonce))
    except TransferError as error:
        # A server without room has answered, and left, before it is asked.
        if error.fault is not TransferFault.PROTOCOL:
            raise
    check_reply(sock.receive(REPLY_BYTES), fetch)
    checksums = Checksums(fetch.ticket, fetch.binding, fetch.layout)
    size = fetch.block_bytes
    for start in range(fetch.first, fetch.first + fetch.count, fetch.chunk_blocks):
        count = min(fetch.chunk_blocks, fetch.first + fetch.count - start)
        given, blocks = receive_chunk(sock, count, size)
        for at, digest in enumerate(given):
            if not equal(checksums.of(start + at, blocks[at * size : (at + 1) * size]), digest):
                raise TransferError(TransferFault.CHECKSUM, f"block {start + at} is not what was sent")
        put(blocks)
    if fetch.count:
        sock.send(THANKS)
