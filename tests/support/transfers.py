"""Connectors of one process: one that offers random bytes, and one that fetches them."""

from __future__ import annotations

import random
import socket
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from catenary.transfer import (
    Connector,
    Fetch,
    Offered,
    TransferError,
    TransferFault,
    TransferSettings,
    name_of,
    new_ticket,
)

SIZE, BLOCKS, CHUNK = 1000, 11, 4
BINDING, LAYOUT = b"b" * 16, b"l" * 16


class Pending:
    """Blocks that are there, or an error."""

    def __init__(self, blocks: memoryview | TransferError) -> None:
        self._blocks = blocks

    def wait(self, timeout_s: float) -> memoryview:
        if isinstance(self._blocks, TransferError):
            raise self._blocks
        return self._blocks


class Source:
    """A BlockSource over random bytes."""

    chunk_blocks = CHUNK

    def __init__(self) -> None:
        self.data = memoryview(random.Random(3).randbytes(BLOCKS * SIZE))
        self.ticket = new_ticket()
        self.offered = Offered(7, self.ticket, BINDING, LAYOUT, BLOCKS, SIZE)
        self.live = True
        self.over: list[int] = []
        self.reads = 0

    def find(self, name: bytes) -> Offered | None:
        return self.offered if self.live and name == name_of(self.ticket) else None

    def reading(self, offered: Offered) -> AbstractContextManager[None]:
        return nullcontext()

    def read(self, offered: Offered, first: int, count: int) -> Pending:
        self.reads += 1
        if not self.live:
            return Pending(TransferError(TransferFault.GONE, "gone"))
        size = offered.block_bytes
        return Pending(self.data[first * size : (first + count) * size])

    def fetched(self, offered: Offered) -> None:
        self.over.append(offered.key)


class Serving:
    """One connector that offers, and one that fetches."""

    def __init__(self, kind: type[Connector], directory: Path, **settings: Any) -> None:
        values = {"timeout_s": 5.0, "max_transfers": 4, **settings}
        self.settings = TransferSettings("127.0.0.1:0", None, directory, **values)
        self.source = Source()
        self.server, self.client = kind(self.settings), kind(self.settings)
        self.address = self.server.serve(self.source)

    def fetch(self, timeout_s: float = 5.0, **fields: Any) -> list[bytes]:
        values = {"first": 0, "count": BLOCKS, "ticket": self.source.ticket, "address": self.address}
        fetch = Fetch(
            **{
                "binding": BINDING,
                "layout": LAYOUT,
                "block_bytes": SIZE,
                "chunk_blocks": CHUNK,
                "deadline": time.monotonic() + timeout_s,
                **values,
                **fields,
            }
        )
        got: list[bytes] = []
        self.client.fetch(fetch, lambda blocks: got.append(bytes(blocks)))
        return got

    def connect(self) -> socket.socket:
        """A stranger's connection."""
        if self.server.name != "shm":
            host, port = self.address.split(":")
            return socket.create_connection((host, int(port)), timeout=5)
        peer = socket.socket(socket.AF_UNIX)
        peer.settimeout(5)
        peer.connect(self.address)
        return peer

    def still_serves(self) -> None:
        """Raises if a transfer does not work."""
        got = b"".join(self.fetch())
        if got != bytes(self.source.data):
            raise AssertionError("other bytes than were offered")
