"""The fetching side of a connector whose peer speaks `protocol`."""

from __future__ import annotations

import socket
from typing import Protocol

from catenary.transfer.connector import Fetch, Put
from catenary.transfer.faults import TransferError, TransferFault
from catenary.transfer.protocol import (
    GREETING_BYTES,
    REPLY_BYTES,
    THANKS,
    check_reply,
    make_request,
    read_greeting,
)
from catenary.transfer.sockets import TimedSocket
from catenary.transfer.tickets import Checksums, equal


class ReceiveChunk(Protocol):
    """Receives `count` blocks of `size` bytes: their checksums, and the blocks."""

    def __call__(self, sock: TimedSocket, count: int, size: int) -> tuple[list[bytes], memoryview]: ...


def fetch_blocks(connection: socket.socket, fetch: Fetch, receive_chunk: ReceiveChunk, put: Put) -> None:
    """Speaks the protocol on a connection, which is the caller's to close.

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
