"""Blocking sockets with one deadline for all that is said on them: a peer cannot stretch it byte by byte."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

from catenary.transfer.faults import TransferError, TransferFault


@contextmanager
def transfer_errors() -> Iterator[None]:
    """Makes a socket's errors TransferErrors."""
    try:
        yield
    except TimeoutError:
        raise TransferError(TransferFault.TIMEOUT, "the transfer took too long") from None
    except OSError as error:
        raise TransferError(TransferFault.PROTOCOL, f"the connection broke: {error.strerror}") from None


class TimedSocket:
    """A connected socket that raises TransferError, and TIMEOUT from `deadline` (time.monotonic()) on."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self.socket = sock
        self.deadline = deadline

    def arm(self) -> None:
        """Gives the next call what is left of the time. Raises TransferError."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TransferError(TransferFault.TIMEOUT, "the transfer took too long")
        self.socket.settimeout(left)

    def send(self, data: bytes | memoryview) -> None:
        """Sends all of it."""
        view = memoryview(data)
        with transfer_errors():
            while view:
                self.arm()
                view = view[self.socket.send(view) :]

    def receive(self, count: int) -> bytes:
        """Exactly so many bytes."""
        data = bytearray(count)
        self.receive_into(memoryview(data))
        return bytes(data)

    def receive_into(self, view: memoryview) -> None:
        """Fills the view."""
        with transfer_errors():
            while view:
                self.arm()
                got = self.socket.recv_into(view)
                if not got:
                    raise TransferError(TransferFault.PROTOCOL, "the peer closed the connection")
                view = view[got:]
