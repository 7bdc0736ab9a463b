"""KV of computed prompts that this engine keeps for others."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass

from catenary.transfer import (
    Offered,
    TransferError,
    TransferFault,
    host_id,
    name_of,
    new_ticket,
)
from services.engine.device import HostCopy
from services.engine.link import OfferedKv
from services.engine.runner import BlockCopies, host_bytes
from services.engine.scheduler import KeptBlocks, Sequence, prompt_name


@dataclass(frozen=True, slots=True)
class OfferTerms:
    """What an offer says beside its ticket, and for how long and for how many blocks it holds."""

    connector: str
    address: str
    layout: bytes
    ttl_s: float
    most_blocks: int


class PendingRead:
    """Implements `PendingBlocks`."""

    def __init__(self, offered: Offered, first: int, count: int) -> None:
        self.offered = offered
        self.first = first
        self.count = count
        self._copy: Future[HostCopy] = Future()

    def done(self, result: HostCopy | Exception) -> None:
        """The device has begun the copy, or failed."""
        if not isinstance(result, Exception):
            self._copy.set_result(result)
        elif isinstance(result, TransferError):
            self._copy.set_exception(result)
        else:
            text = f"the device did not read blocks: {type(result).__name__}"
            self._copy.set_exception(TransferError(TransferFault.DEVICE, text))

    def wait(self, timeout_s: float) -> memoryview:
        try:
            copy = self._copy.result(max(0.0, timeout_s))
        except TimeoutError:
            raise TransferError(TransferFault.TIMEOUT, "the engine did not come to read blocks") from None
        return host_bytes(copy, self.count, self.offered.block_bytes)


@dataclass(frozen=True, slots=True)
class _Offer:
    offered: Offered
    name: bytes
    blocks: list[int]
    expires: float


class OfferBook:
    """All offers, the oldest first. Implements `BlockSource`, whose methods any thread calls.

    The others are the loop's. Blocks are read when they are asked for, in the order of the device's work: a
    read that the loop has begun is whole, whatever happens to the blocks afterwards.
    """

    def __init__(
        self,
        kept: KeptBlocks,
        copies: BlockCopies,
        *,
        block_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kept = kept
        self._copies = copies
        self._block_size = block_size
        self._clock = clock
        self._host = host_id()
        self.terms: OfferTerms | None = None
        self._wake: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._offers: dict[int, _Offer] = {}
        self._by_name: dict[bytes, _Offer] = {}
        # Transfers under way, by offer.
        self._readers: Counter[int] = Counter()
        self._reads: deque[PendingRead] = deque()
        self._fetched: deque[int] = deque()
        self.blocks = 0
        self._freed = False
        self.made = self.fetched_count = self.expired = self.evicted = self.withdrawn = self.bytes_sent = 0

    def __len__(self) -> int:
        return len(self._offers)

    def attach(self, wake: Callable[[], None]) -> None:
        """Tells what wakes the loop, from any thread."""
        self._wake = wake

    @property
    def chunk_blocks(self) -> int:
        """See BlockSource."""
        return self._copies.blocks

    def find(self, name: bytes) -> Offered | None:
        """See BlockSource."""
        with self._lock:
            offer = self._by_name.get(name)
        return None if offer is None else offer.offered

    @contextmanager
    def reading(self, offered: Offered) -> Iterator[None]:
        """See BlockSource."""
        with self._lock:
            self._readers[offered.key] += 1
        try:
            yield
        finally:
            with self._lock:
                self._readers[offered.key] -= 1
                if not self._readers[offered.key]:
                    del self._readers[offered.key]
            # It may have expired meanwhile.
            self._wake()

    def read(self, offered: Offered, first: int, count: int) -> PendingRead:
        """See BlockSource."""
        read = PendingRead(offered, first, count)
        self._reads.append(read)
        self._wake()
        return read

    def fetched(self, offered: Offered) -> None:
        """See BlockSource."""
        self._fetched.append(offered.key)
        self._wake()

    def offer(self, sequence: Sequence) -> OfferedKv | None:
        """Offers what is kept of a sequence that has just ended; None if it was given up already."""
        terms, blocks = self.terms, self._kept.table(sequence.key)
        if terms is None or blocks is None:
            return None
        tokens, ticket = sequence.prompt_len, new_ticket()
        binding = prompt_name(sequence, tokens, self._block_size)
        offered = Offered(sequence.key, ticket, binding, terms.layout, len(blocks), self._copies.block_bytes)
        offer = _Offer(offered, name_of(ticket), blocks, self._clock() + terms.ttl_s)
        with self._lock:
            self._offers[sequence.key] = self._by_name[offer.name] = offer
        self.blocks += len(blocks)
        self.made += 1
        while self.blocks > terms.most_blocks and (oldest := self._oldest()) is not None:
            if oldest == sequence.key:
                break
            self._kept.release(self._drop(oldest))
            self.evicted += 1
        return OfferedKv(
            connector=terms.connector,
            address=terms.address,
            ticket=ticket,
            host_id=self._host,
            blocks=len(blocks),
            tokens=tokens,
            layout=terms.layout,
        )

    def withdraw(self, key: int) -> bool:
        """Ends an offer that nobody will fetch. False if there is none."""
        if key not in self._offers:
            return False
        self._kept.release(self._drop(key))
        self.withdrawn += 1
        return True

    def patience(self) -> float | None:
        """Seconds until something is to be done; None: nothing ever."""
        if self._reads or self._fetched:
            return 0.0
        oldest = self._oldest()
        return None if oldest is None else max(0.0, self._offers[oldest].expires - self._clock())

    def turn(self) -> bool:
        """Ends what is over, and begins reads. True if blocks came free since the last turn."""
        while self._fetched:
            key = self._fetched.popleft()
            if key in self._offers:
                self._kept.release(self._drop(key))
                self.fetched_count += 1
        self._end_old()
        for _ in range(min(self._copies.per_turn, len(self._reads))):
            self._begin(self._reads.popleft())
        freed, self._freed = self._freed, False
        return freed

    def _end_old(self) -> None:
        # The scheduler gives up the oldest first, whoever reads them.
        while (oldest := next(iter(self._offers), None)) is not None and oldest not in self._kept:
            self._drop(oldest)
            self.evicted += 1
        now = self._clock()
        while (oldest := self._oldest()) is not None and self._offers[oldest].expires <= now:
            self._kept.release(self._drop(oldest))
            self.expired += 1

    def _oldest(self) -> int | None:
        """The oldest offer that nobody fetches now: what is fetched has a deadline of its own."""
        with self._lock:
            return next((key for key in self._offers if key not in self._readers), None)

    def _begin(self, read: PendingRead) -> None:
        offer = self._offers.get(read.offered.key)
        if offer is None or offer.offered.key not in self._kept:
            read.done(TransferError(TransferFault.GONE, "the offer is over"))
            return
        self.bytes_sent += read.count * read.offered.block_bytes
        self._copies.read(offer.blocks[read.first : read.first + read.count], read.done)

    def _drop(self, key: int) -> int:
        """Forgets an offer; returns its key."""
        with self._lock:
            offer = self._offers.pop(key)
            del self._by_name[offer.name]
        self.blocks -= len(offer.blocks)
        self._freed = True
        return key
