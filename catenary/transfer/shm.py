"""KV between engines of one host, through memory that both map.

The fetching engine connects to a unix socket of the offering one. For each chunk it gets a descriptor of
anonymous memory (memfd) with the checksums and the blocks, and says that it has it. Such memory has no name:
no other process can find it, the size of /dev/shm does not limit it, and the kernel frees it with the last
process that has it, however that ends. That the descriptor arrives proves that both are on one host. The
socket alone has a name; those of engines that were killed are removed by the next engine in the directory.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import socket
import stat
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, Final

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
from catenary.transfer.protocol import TimedSocket, fetch_blocks, transfer_errors
from catenary.transfer.serving import OfferServer

_SUFFIX: Final = ".kv"
_TAKEN: Final = b"\x01"
# No process can shrink it under a reader, which would be a SIGBUS, nor write to it once it is sent.
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


class ShmConnector(Connector):
    """Passes descriptors of sealed memory."""

    name: ClassVar[str] = "shm"

    def __init__(self, settings: TransferSettings) -> None:
        super().__init__(settings)
        self.server: OfferServer | None = None
        self._path: Path | None = None

    def serve(self, source: BlockSource) -> str:
        directory = self.settings.directory
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_own(directory)
        sweep(directory)
        fresh = directory / secrets.token_hex(8)
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(str(fresh))
            fresh.chmod(0o600)
        except OSError:
            listener.close()
            raise
        self.server = OfferServer(
            listener,
            source,
            send_chunk,
            timeout_s=self.settings.timeout_s,
            max_transfers=self.settings.max_transfers,
        )
        # Only now: another engine's sweep takes a socket without a listener for that of a dead engine.
        self._path = fresh.rename(fresh.with_suffix(_SUFFIX))
        return str(self._path)

    def fetch(self, fetch: Fetch, put: Put) -> None:
        with socket.socket(socket.AF_UNIX) as connection:
            try:
                TimedSocket(connection, fetch.deadline).arm()
                connection.connect(fetch.address)
            except (OSError, ValueError):
                raise TransferError(
                    TransferFault.UNREACHABLE, "nobody answers at the offer's socket"
                ) from None
            fetch_blocks(connection, fetch, _receive_chunk, put)

    def close(self) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        if self.server is not None:
            self.server.close()


def _check_own(directory: Path) -> None:
    """Raise OSError if others made the directory, whose name they can guess, or may change what is in it:
    they could take sockets away, or put their own there."""
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, f"{directory} is another user's, or a link: remove it")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(errno.EPERM, f"others may write to {directory}: chmod go-w mends that")


def sweep(directory: Path) -> int:
    """Remove the sockets in the directory on which no process listens any more. Return how many."""
    removed = 0
    for path in directory.glob(f"*{_SUFFIX}"):
        with suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
            if not stat.S_ISSOCK(path.lstat().st_mode):
                continue
            # A busy one has no room for one more: that is no refusal.
            probe.setblocking(False)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()
                removed += 1
    return removed


def send_chunk(sock: TimedSocket, digests: list[bytes], blocks: memoryview) -> None:
    head = b"".join(digests)
    memory = os.memfd_create("catenary-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        fill(memory, (memoryview(head), blocks))
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _SEALS)
        with transfer_errors():
            sock.arm()
            socket.send_fds(sock.socket, [b"\0"], [memory])
    finally:
        os.close(memory)
    # A descriptor is a byte to the socket: it would hold all KV of a prompt for a peer that reads nothing.
    if sock.receive(len(_TAKEN)) != _TAKEN:
        raise TransferError(TransferFault.PROTOCOL, "the peer does not say that it has the chunk")


def fill(memory: int, parts: tuple[memoryview, ...]) -> None:
    with transfer_errors():
        for part in parts:
            while part:
                part = part[os.write(memory, part) :]


def _receive_chunk(sock: TimedSocket, count: int, size: int) -> tuple[list[bytes], memoryview]:
    with transfer_errors():
        sock.arm()
        data, descriptors, _, _ = socket.recv_fds(sock.socket, 1, 1, socket.MSG_CMSG_CLOEXEC)
    try:
        if not data or len(descriptors) != 1:
            raise TransferError(TransferFault.PROTOCOL, "no memory came with a chunk")
        mapped = _map(descriptors[0], count * (DIGEST_BYTES + size))
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    sock.send(_TAKEN)
    head = count * DIGEST_BYTES
    digests = bytes(mapped[:head])
    return [digests[at : at + DIGEST_BYTES] for at in range(0, head, DIGEST_BYTES)], mapped[head:]


def _map(memory: int, size: int) -> memoryview:
    """Map memory that cannot change any more."""
    try:
        sealed = fcntl.fcntl(memory, fcntl.F_GET_SEALS) & _SEALS == _SEALS
        if not sealed or os.fstat(memory).st_size != size:
            raise TransferError(TransferFault.PROTOCOL, "a chunk's memory is not sealed, or of another size")
        return memoryview(mmap.mmap(memory, size, mmap.MAP_SHARED, mmap.PROT_READ))
    except OSError as error:
        text = f"a chunk's memory cannot be mapped: {error.strerror}"
        raise TransferError(TransferFault.PROTOCOL, text) from None
