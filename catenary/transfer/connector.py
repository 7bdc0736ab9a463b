"""What moves KV between engines, and how one is found by name.

A connector lives in the core's process beside the device, so that KV passes no other. It has two sides. The
offering side answers whoever brings a ticket, and asks a `BlockSource` for the blocks when they are wanted.
The fetching side is called from threads of its own. Neither ever runs in the loop's thread.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class TlsPaths:
    """PEM files: this engine's certificate with its key, and the authority of all engines' certificates."""

    cert: str
    key: str
    ca: str


@dataclass(frozen=True, slots=True)
class TransferSettings:
    """What the options say. A transfer has `timeout_s` for all of it; there are `max_transfers` at once.

    `listen` and `advertise` (None: what is bound) are host:port of connectors that listen on the network,
    `directory` is where those that do not put their sockets.
    """

    listen: str
    advertise: str | None
    directory: Path
    timeout_s: float
    max_transfers: int
    tls: TlsPaths | None = None


@dataclass(frozen=True, slots=True)
class Offered:
    """An offer as a connector serves it: `blocks` blocks of `block_bytes` bytes."""

    key: int
    ticket: bytes
    binding: bytes
    layout: bytes
    blocks: int
    block_bytes: int


class PendingBlocks(Protocol):
    """Blocks on their way from the device."""

    def wait(self, timeout_s: float) -> memoryview:
        """The blocks' bytes, one after another. Raises TransferError."""
        ...


class BlockSource(Protocol):
    """The engine as its offering side sees it. Called from any thread."""

    @property
    def chunk_blocks(self) -> int:
        """The most blocks that one `read` takes."""
        ...

    def find(self, name: bytes) -> Offered | None:
        """The live offer of this public name."""
        ...

    def reading(self, offered: Offered) -> AbstractContextManager[None]:
        """Around a transfer: an offer does not expire under who fetches it."""
        ...

    def read(self, offered: Offered, first: int, count: int) -> PendingBlocks:
        """Begins to read blocks [first, first + count) of an offer."""
        ...

    def fetched(self, offered: Offered) -> None:
        """Somebody has all of the offer that he wants: it is over."""
        ...


@dataclass(frozen=True, slots=True)
class Fetch:
    """What is to be fetched: blocks [first, first + count) of an offer; with none of them it is given back.

    `deadline`: time.monotonic() by which it has to be done.
    """

    ticket: bytes
    address: str
    binding: bytes
    layout: bytes
    first: int
    count: int
    block_bytes: int
    chunk_blocks: int
    deadline: float


Put: TypeAlias = Callable[[memoryview], None]
"""Takes the next `chunk_blocks` blocks (of the last chunk: what is left), whose checksums are right. May
wait. What it raises ends the fetch."""


class Connector(ABC):
    """Moves blocks one way: from an engine that offers to one that fetches. `name` is that of `KvOffer`."""

    name: ClassVar[str]

    def __init__(self, settings: TransferSettings) -> None:
        self.settings = settings

    @abstractmethod
    def serve(self, source: BlockSource) -> str:
        """Begins to answer for offers. Returns the address for `KvOffer`, at most 512 characters.

        Raises OSError.
        """

    @abstractmethod
    def fetch(self, fetch: Fetch, put: Put) -> None:
        """Hands all blocks to `put`, in order, and tells the offering side that it has them.

        Raises TransferError. Called from several threads at once.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends the offering side, and gives up what it is at. Idempotent."""


def load_connector(spec: str, builtin: dict[str, type[Connector]]) -> type[Connector]:
    """The connector of this name, or the class that MODULE:CLASS names. Raises ValueError, one line."""
    if spec in builtin:
        return builtin[spec]
    module, colon, name = spec.partition(":")
    if not colon:
        raise ValueError(
            f"kv-connector {spec!r} is not one of {', '.join(sorted(builtin))}, nor MODULE:CLASS"
        )
    try:
        found: Any = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"kv-connector {spec} cannot be loaded: {error}") from None
    if not (isinstance(found, type) and issubclass(found, Connector)):
        raise ValueError(f"kv-connector {spec} is not a Connector")
    return found
