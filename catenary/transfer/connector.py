"""Connectors, which move KV between engines, and how one is found by name.

A connector lives in the process of the core and its device, so that KV passes through no other. It has two
sides. The offering side answers a peer with a ticket, and asks a `BlockSource` for the blocks when they are
wanted. The fetching side is called from threads of its own. Neither ever runs in the loop's thread.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib
import secrets
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol, TypeAlias


class TransferFault(StrEnum):
    """A closed set: it labels a metric."""

    # The offer names a connector that is not known here.
    CONNECTOR = "connector"
    # Shared memory with another host.
    HOST = "host"
    # Another block size, model, dtype or order of the numbers.
    LAYOUT = "layout"
    # The offer is malformed, or for another prompt.
    MISMATCH = "mismatch"
    # No process answers at the address.
    UNREACHABLE = "unreachable"
    # The offer was fetched before, expired or was evicted; or the ticket is another one's.
    GONE = "gone"
    # A block does not have the checksum that came with it.
    CHECKSUM = "checksum"
    # The peer broke the protocol or went away in the middle.
    PROTOCOL = "protocol"
    TIMEOUT = "timeout"
    # Too many transfers at once.
    BUSY = "busy"
    # No blocks were free here, or they were needed by others before the sequence could start.
    NO_BLOCKS = "no_blocks"
    # The device failed to copy.
    DEVICE = "device"


class TransferError(Exception):
    """KV was not moved. The text is for logs."""

    def __init__(self, fault: TransferFault, text: str) -> None:
        super().__init__(text)
        self.fault = fault


_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_id() -> str:
    """Return an id of this host, the same for all processes of one kernel since its start, and for no others.
    Empty: it cannot be told.

    A digest: the kernel's own id is not for the network.
    """
    try:
        boot = _BOOT_ID.read_bytes()
    except OSError:
        return ""
    return hashlib.blake2b(boot, digest_size=16, person=b"catenary host").hexdigest()


# What a fast device and a fast network move while an engine that is busy makes one step.
_WINDOW_BYTES: Final = 64 << 20
_MOST_CHUNKS: Final = 16


def window_of(chunk_bytes: int) -> int:
    """Return how many chunks of this size are on their way at once: an engine looks once a step."""
    return max(2, min(_MOST_CHUNKS, _WINDOW_BYTES // chunk_bytes))


TICKET_BYTES: Final = 32
DIGEST_BYTES: Final = 16

_NAME: Final = b"catenary kv name"
_REQUEST: Final = b"catenary kv ask"
_BLOCK: Final = b"catenary kv data"


def new_ticket() -> bytes:
    """Return a random ticket."""
    return secrets.token_bytes(TICKET_BYTES)


def name_of(ticket: bytes) -> bytes:
    """Return the public name of the ticket's offer, 16 bytes."""
    return hashlib.blake2b(ticket, digest_size=DIGEST_BYTES, person=_NAME).digest()


def sign(ticket: bytes, nonce: bytes, request: bytes) -> bytes:
    """Return the proof, 16 bytes, that the sender of `request` on a connection with this nonce has the
    ticket."""
    return hashlib.blake2b(nonce + request, digest_size=DIGEST_BYTES, key=ticket, person=_REQUEST).digest()


def equal(one: bytes, other: bytes) -> bool:
    """Compare secrets in constant time."""
    return hmac.compare_digest(one, other)


class Checksums:
    """Checksums of one offer's blocks, 16 bytes each."""

    def __init__(self, ticket: bytes, binding: bytes, layout: bytes) -> None:
        self._keyed = hashlib.blake2b(digest_size=DIGEST_BYTES, key=ticket, person=_BLOCK)
        self._keyed.update(binding + layout)

    def of(self, index: int, block: memoryview) -> bytes:
        """Return the checksum of the offer's block `index`."""
        digest = self._keyed.copy()
        digest.update(index.to_bytes(4, "little") + zlib.crc32(block).to_bytes(4, "little"))
        return digest.digest()


@dataclass(frozen=True, slots=True)
class TlsPaths:
    """PEM files: this engine's certificate with its key, and the authority of all engines' certificates."""

    cert: str
    key: str
    ca: str


@dataclass(frozen=True, slots=True)
class TransferSettings:
    """The options of transfers. One has `timeout_s` for all of it; there are `max_transfers` at once.

    `listen` and `advertise` (None: the bound address) are host:port of connectors that listen on the network,
    `directory` is where the others put their sockets.
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
        """Return the blocks' bytes, one after another. Raises TransferError."""
        ...


class BlockSource(Protocol):
    """The engine as its offering side sees it. Called from any thread."""

    @property
    def chunk_blocks(self) -> int:
        """The most blocks that one `read` takes."""
        ...

    def find(self, name: bytes) -> Offered | None:
        """Return the live offer of this public name."""
        ...

    def reading(self, offered: Offered) -> AbstractContextManager[None]:
        """Keep an offer from expiring during a transfer."""
        ...

    def read(self, offered: Offered, first: int, count: int) -> PendingBlocks:
        """Begin to read blocks [first, first + count) of an offer."""
        ...

    def fetched(self, offered: Offered) -> None:
        """End an offer: all blocks that were wanted are fetched."""
        ...


@dataclass(frozen=True, slots=True)
class Fetch:
    """A fetch of blocks [first, first + count) of an offer; with none of them the offer is given back.

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
        """Begin to answer for offers. Returns the address for `KvOffer`, at most 512 characters.

        Raises OSError.
        """

    @abstractmethod
    def fetch(self, fetch: Fetch, put: Put) -> None:
        """Hand all blocks to `put`, in order, and tell the offering side that they have arrived.

        Raises TransferError. Called from several threads at once.
        """

    @abstractmethod
    def close(self) -> None:
        """End the offering side and its transfers. Idempotent."""


def load_connector(spec: str, builtin: dict[str, type[Connector]]) -> type[Connector]:
    """Return the connector of this name, or the class at MODULE:CLASS. Raises ValueError, one line."""
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
