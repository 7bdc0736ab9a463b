"""The offering side of a connector that listens: one thread that accepts, one for each connection."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Protocol

from catenary.telemetry import get_logger
from catenary.transfer.connector import (
    TICKET_BYTES,
    BlockSource,
    Checksums,
    Offered,
    PendingBlocks,
    TransferError,
    TransferFault,
    equal,
    sign,
    window_of,
)
from catenary.transfer.protocol import (
    REQUEST_BYTES,
    THANKS,
    Kind,
    Request,
    Status,
    TimedSocket,
    make_reply,
    new_greeting,
    read_request,
)

log = get_logger(__name__)

# A peer sends its request at once, with the proof that it has a ticket.
_HANDSHAKE_S: Final = 2.0
_BACKLOG: Final = 64

# Compared with where there is no offer, so that a wrong name takes as long as a wrong proof.
_NO_TICKET: Final = bytes(TICKET_BYTES)


class SendChunk(Protocol):
    """Sends blocks with their checksums, in a connector's own way."""

    def __call__(self, sock: TimedSocket, digests: list[bytes], blocks: memoryview) -> None: ...


class OfferServer:
    """Answers for offers on a listening socket, which it owns. At most `max_transfers` connections at once.

    A further connection closes the oldest one that has shown no ticket: peers that only connect cannot keep
    others out.
    """

    def __init__(
        self,
        listener: socket.socket,
        source: BlockSource,
        send_chunk: SendChunk,
        *,
        timeout_s: float,
        max_transfers: int,
        wrap: Callable[[socket.socket], socket.socket] | None = None,
    ) -> None:
        """`wrap` returns the socket to speak on for a connection. It does not wait for the peer; it may raise
        OSError."""
        self._listener = listener
        self._source = source
        self._send_chunk = send_chunk
        self._timeout_s = timeout_s
        self._places = max_transfers
        self._wrap = wrap
        self._lock = threading.Lock()
        # In the order of their coming; those that have shown a ticket are True.
        self._open: dict[socket.socket, bool] = {}
        self._closed = False
        listener.listen(_BACKLOG)
        self._thread = threading.Thread(target=self._accept, name="kv offers", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """Number of open connections."""
        return len(self._open)

    def close(self) -> None:
        """Shut everything. Idempotent."""
        with self._lock:
            self._closed = True
            connections = list(self._open)
        # A thread that is blocked in accept is woken by this, not by closing.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in connections:
            _shut(connection)
        self._thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                # Out of descriptors, say: it may pass.
                time.sleep(0.05)
                continue
            if self._wrap is not None:
                try:
                    connection = self._wrap(connection)
                except OSError:
                    # It is gone already.
                    connection.close()
                    continue
            if not (self._enter(connection) and self._start(connection)):
                self._refuse(connection)

    def _enter(self, connection: socket.socket) -> bool:
        with self._lock:
            if self._closed:
                return False
            if len(self._open) >= self._places:
                stranger = next((one for one, known in self._open.items() if not known), None)
                if stranger is None:
                    return False
                del self._open[stranger]
                _shut(stranger)
            self._open[connection] = False
            return True

    def _start(self, connection: socket.socket) -> bool:
        thread = threading.Thread(target=self._serve, args=(connection,), name="kv transfer", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            # Out of threads: it may pass, too.
            log.warning("no thread for a KV transfer")
            with self._lock:
                self._open.pop(connection, None)
            return False
        return True

    def _refuse(self, connection: socket.socket) -> None:
        """Tell a newcomer that all places are taken; by hanging up where a handshake is due."""
        with suppress(OSError), connection:
            if self._wrap is not None:
                return
            connection.setblocking(False)
            connection.send(new_greeting()[0] + make_reply(Status.BUSY))

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                self._talk(TimedSocket(connection, time.monotonic() + min(_HANDSHAKE_S, self._timeout_s)))
        except TransferError as error:
            log.debug("a KV transfer ended early", fault=error.fault.value, reason=str(error))
        except Exception:
            log.exception("a KV transfer failed")
        finally:
            with self._lock:
                self._open.pop(connection, None)

    def _talk(self, sock: TimedSocket) -> None:
        greeting, nonce = new_greeting()
        sock.send(greeting)
        request = read_request(sock.receive(REQUEST_BYTES))
        status, offered = self._judge(request, nonce)
        if status is not Status.OK or offered is None:
            sock.send(make_reply(status))
            return
        with self._lock:
            if sock.socket in self._open:
                self._open[sock.socket] = True
        sock.deadline = time.monotonic() + self._timeout_s
        with self._source.reading(offered):
            if request.kind is Kind.FETCH:
                sock.send(make_reply(Status.OK, offered.block_bytes, request.count))
                self._send_blocks(sock, offered, request)
                if sock.receive(len(THANKS)) != THANKS:
                    raise TransferError(
                        TransferFault.PROTOCOL, "the peer does not say that it has the blocks"
                    )
            self._source.fetched(offered)
        if request.kind is Kind.GIVE_BACK:
            sock.send(make_reply(Status.OK))

    def _judge(self, request: Request, nonce: bytes) -> tuple[Status, Offered | None]:
        offered = self._source.find(request.name)
        ticket = _NO_TICKET if offered is None else offered.ticket
        proven = equal(sign(ticket, nonce, request.body), request.proof)
        if offered is None or not proven:
            return Status.GONE, None
        if request.layout != offered.layout:
            return Status.LAYOUT, None
        empty = request.kind is Kind.FETCH and not request.count
        if request.binding != offered.binding or empty or request.first + request.count > offered.blocks:
            return Status.MISMATCH, None
        return Status.OK, offered

    def _send_blocks(self, sock: TimedSocket, offered: Offered, request: Request) -> None:
        """Send chunks, each while the device reads those after it."""
        checksums = Checksums(offered.ticket, offered.binding, offered.layout)
        step, end, size = self._source.chunk_blocks, request.first + request.count, offered.block_bytes
        starts = range(request.first, end, step)
        window = window_of(step * size)
        pending: deque[PendingBlocks] = deque()
        for at, start in enumerate(starts):
            for following in starts[at + len(pending) : at + window]:
                pending.append(self._source.read(offered, following, min(step, end - following)))
            blocks = pending.popleft().wait(sock.deadline - time.monotonic())
            count = len(blocks) // size
            digests = [checksums.of(start + i, blocks[i * size : (i + 1) * size]) for i in range(count)]
            self._send_chunk(sock, digests, blocks)


def _shut(connection: socket.socket) -> None:
    """End what a thread waits for on this connection; that thread closes it."""
    with suppress(OSError):
        # Not the method of a TLS socket: that one makes a plain socket of it first.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
