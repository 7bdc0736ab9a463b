"""An engine's part in a prefill/decode split: KV offered to others, or fetched, as its role says."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from catenary.directories import expanded
from catenary.transfer import (
    BUILTIN,
    Connector,
    Offered,
    TlsPaths,
    TransferError,
    TransferFault,
    TransferSettings,
    host_id,
    load_connector,
    name_of,
    new_ticket,
)
from services.engine.core.arrivals import Arrivals, Waiting
from services.engine.core.errors import StartError
from services.engine.core.sizing import Sizing
from services.engine.device import HostCopy
from services.engine.domain import CoreErrorCode, SamplingOptions
from services.engine.link import OfferedKv, SubmitSequence, TransferLoad
from services.engine.model import weights_fingerprint
from services.engine.model.paged import PagedModel
from services.engine.options import EngineOptions
from services.engine.runner import BlockCopies, host_bytes
from services.engine.scheduler import (
    Scheduler,
    Sequence,
    SequenceRefused,
    TransferBlocks,
    prompt_name,
    sequence_from,
)

# Of the digest below: raised when the order of the numbers in a block changes.
_LAYOUT_VERSION = 2
_STRETCHED = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True)
class OfferTerms:
    """Common facts of all offers; `ttl_s` is the life of one, `most_blocks` bounds all."""

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
        """Pass on the copy that the device has begun, or its failure."""
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
    """All offers, the oldest first. Implements `BlockSource`, for calls from any thread.

    The others are the loop's. Blocks are read when they are asked for, in the order of the device's work: a
    read that the loop has begun is whole, whatever happens to the blocks afterwards.
    """

    def __init__(
        self,
        transfer_blocks: TransferBlocks,
        copies: BlockCopies,
        *,
        block_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transfer_blocks = transfer_blocks
        self._copies = copies
        self._block_size = block_size
        self.clock = clock
        self._host = host_id()
        self.terms: OfferTerms | None = None
        self._wake: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._offers: dict[int, _Offer] = {}
        self._by_name: dict[bytes, _Offer] = {}
        # Transfers under way, by offer.
        self._readers: Counter[int] = Counter()
        self.reads: deque[PendingRead] = deque()
        self._fetched: deque[int] = deque()
        self.blocks = 0
        self._freed = False
        self.made = self.fetched_count = self.expired = self.evicted = self.withdrawn = self.bytes_sent = 0

    def __len__(self) -> int:
        return len(self._offers)

    def attach(self, wake: Callable[[], None]) -> None:
        """Set the function that wakes the loop, from any thread."""
        self._wake = wake

    @property
    def chunk_blocks(self) -> int:
        return self._copies.blocks

    def find(self, name: bytes) -> Offered | None:
        with self._lock:
            offer = self._by_name.get(name)
        return None if offer is None else offer.offered

    @contextmanager
    def reading(self, offered: Offered) -> Iterator[None]:
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
        read = PendingRead(offered, first, count)
        self.reads.append(read)
        self._wake()
        return read

    def fetched(self, offered: Offered) -> None:
        self._fetched.append(offered.key)
        self._wake()

    def offer(self, sequence: Sequence) -> OfferedKv | None:
        """Offer the KV of a sequence that has just ended; None if its blocks were evicted already."""
        terms, blocks = self.terms, self._transfer_blocks.table(sequence.key)
        if terms is None or blocks is None:
            return None
        tokens, ticket = sequence.prompt_len, new_ticket()
        binding = prompt_name(sequence, tokens, self._block_size)
        offered = Offered(sequence.key, ticket, binding, terms.layout, len(blocks), self._copies.block_bytes)
        offer = _Offer(offered, name_of(ticket), blocks, self.clock() + terms.ttl_s)
        with self._lock:
            self._offers[sequence.key] = self._by_name[offer.name] = offer
        self.blocks += len(blocks)
        self.made += 1
        while self.blocks > terms.most_blocks and (oldest := self._oldest()) is not None:
            if oldest == sequence.key:
                break
            self._transfer_blocks.release(self._drop(oldest))
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
        """End an offer that will not be fetched. False if there is none."""
        if key not in self._offers:
            return False
        self._transfer_blocks.release(self._drop(key))
        self.withdrawn += 1
        return True

    def patience(self) -> float | None:
        """Return the seconds until something falls due; None: nothing does."""
        if self.reads or self._fetched:
            return 0.0
        oldest = self._oldest()
        return None if oldest is None else max(0.0, self._offers[oldest].expires - self.clock())

    def turn(self) -> bool:
        """End offers that are over, and begin reads. True if blocks came free since the last turn."""
        while self._fetched:
            key = self._fetched.popleft()
            if key in self._offers:
                self._transfer_blocks.release(self._drop(key))
                self.fetched_count += 1
        self._end_old()
        for _ in range(min(self._copies.per_turn, len(self.reads))):
            self._begin(self.reads.popleft())
        freed, self._freed = self._freed, False
        return freed

    def _end_old(self) -> None:
        # The scheduler evicts the oldest first, also while they are read.
        while (oldest := next(iter(self._offers), None)) is not None and oldest not in self._transfer_blocks:
            self._drop(oldest)
            self.evicted += 1
        now = self.clock()
        while (oldest := self._oldest()) is not None and self._offers[oldest].expires <= now:
            self._transfer_blocks.release(self._drop(oldest))
            self.expired += 1

    def _oldest(self) -> int | None:
        """Return the oldest offer that is not being fetched: a fetch has a deadline of its own."""
        with self._lock:
            return next((key for key in self._offers if key not in self._readers), None)

    def _begin(self, read: PendingRead) -> None:
        offer = self._offers.get(read.offered.key)
        if offer is None or offer.offered.key not in self._transfer_blocks:
            read.done(TransferError(TransferFault.GONE, "the offer is over"))
            return
        self.bytes_sent += read.count * read.offered.block_bytes
        self._copies.read(offer.blocks[read.first : read.first + read.count], read.done)

    def _drop(self, key: int) -> int:
        """Forget an offer; return its key."""
        with self._lock:
            offer = self._offers.pop(key)
            del self._by_name[offer.name]
        self.blocks -= len(offer.blocks)
        self._freed = True
        return key


class Handover:
    """Offers, arrivals, or neither, as the role says."""

    def __init__(
        self,
        scheduler: Scheduler,
        offers: OfferBook | None = None,
        arrivals: Arrivals | None = None,
        connectors: tuple[Connector, ...] = (),
    ) -> None:
        self._scheduler = scheduler
        self.offers = offers
        self.arrivals = arrivals
        self.connectors = connectors

    def __len__(self) -> int:
        """Number of sequences that wait for KV."""
        return 0 if self.arrivals is None else len(self.arrivals)

    def attach(self, wake: Callable[[], None]) -> None:
        """Set the function that wakes the loop, from any thread."""
        for part in (self.offers, self.arrivals):
            if part is not None:
                part.attach(wake)

    @property
    def patience(self) -> float | None:
        """Seconds until something is to be done; None: until a thread wakes the loop."""
        limits = [part.patience() for part in (self.offers, self.arrivals) if part is not None]
        return min((limit for limit in limits if limit is not None), default=None)

    def begin(self, sequence: Sequence, message: SubmitSequence) -> bool:
        """Return True if the sequence waits for KV, or for one that does; `turn` gives it back."""
        return self.arrivals is not None and self.arrivals.begin(sequence, message)

    def turn(self) -> tuple[list[Waiting], bool]:
        """Do what is due. Return the sequences to be queued, and whether blocks came free."""
        freed = self.offers is not None and self.offers.turn()
        if self.arrivals is None:
            return [], freed
        self.arrivals.turn()
        return self.arrivals.ready(), freed

    def abort(self, key: int) -> Sequence | None:
        """Take out a sequence that waits, and return it; or withdraw the offer of one that ended."""
        if self.offers is not None:
            self.offers.withdraw(key)
        return None if self.arrivals is None else self.arrivals.abort(key)

    def offer(self, sequence: Sequence) -> OfferedKv | None:
        """Offer KV that was computed for another engine; None if it was evicted already."""
        return None if self.offers is None else self.offers.offer(sequence)

    def forget(self, key: int) -> None:
        """Free KV that came for a sequence that ended before the scheduler had it."""
        if self.arrivals is not None:
            self._scheduler.transfer_blocks.release(key)

    def load(self) -> TransferLoad:
        """Return the figures of transfers since the start."""
        load = TransferLoad()
        if (book := self.offers) is not None:
            load = TransferLoad(
                made=book.made,
                fetched=book.fetched_count,
                expired=book.expired,
                evicted=book.evicted,
                withdrawn=book.withdrawn,
                offers=len(book),
                blocks=book.blocks,
                bytes_sent=book.bytes_sent,
            )
        if (arrivals := self.arrivals) is not None:
            faults, lost = dict(arrivals.faults), self._scheduler.forfeited
            if lost:
                no_blocks = TransferFault.NO_BLOCKS.value
                faults[no_blocks] = faults.get(no_blocks, 0) + lost
            load = replace(
                load,
                arrived=self._scheduler.provided,
                fetching=arrivals.fetching,
                bytes_received=arrivals.bytes_received,
                faults=faults,
            )
        return load

    def close(self) -> None:
        """End the connectors and tell all threads to end."""
        if self.arrivals is not None:
            self.arrivals.close()
        for connector in self.connectors:
            connector.close()


def prompt_alone(message: SubmitSequence) -> Sequence:
    """Return the sequence that computes a prompt for another engine: all of it but the last token.

    It samples one token, which is never sent: the scheduler ends a sequence with one, and whether the logits
    are numbers tells whether the KV is. Raises SequenceRefused for what cannot be handed over.
    """
    if not 2 <= message.prompt_len == len(message.token_ids) or message.beams is not None:
        raise SequenceRefused(
            CoreErrorCode.INVALID_ARGUMENT,
            "prefill_only takes a prompt of at least 2 tokens, without emitted ones and beams",
        )
    sequence = sequence_from(
        replace(
            message,
            token_ids=message.token_ids[:-1],
            prompt_len=message.prompt_len - 1,
            sampling=SamplingOptions(temperature=0.0),
            max_tokens=1,
            min_tokens=0,
            stop_token_ids=[],
            constraint=None,
        ),
        (),
    )
    sequence.hands_over = True
    return sequence


def open_handover(
    options: EngineOptions,
    sizing: Sizing,
    model: PagedModel,
    directory: Path,
    config: Mapping[str, Any],
    scheduler: Scheduler,
    copies: BlockCopies,
) -> Handover:
    """Open the part that the role asks for. Raises StartError if a connector cannot be opened."""
    if options.role == "both":
        return Handover(scheduler)
    settings = TransferSettings(
        listen=options.kv_transfer_listen,
        advertise=options.kv_transfer_advertise,
        directory=_directory(options),
        timeout_s=options.kv_transfer_timeout_s,
        max_transfers=options.max_kv_transfers,
        tls=_tls(options),
    )
    layout = layout_of(options, sizing.block_size, model, directory, config)
    own = load_connector(options.kv_connector, BUILTIN)(settings)
    if options.role == "decode":
        connectors = {name: kind(settings) for name, kind in BUILTIN.items()} | {own.name: own}
        arrivals = Arrivals(
            scheduler,
            copies,
            connectors,
            layout=layout,
            block_size=sizing.block_size,
            timeout_s=options.kv_transfer_timeout_s,
            max_transfers=options.max_kv_transfers,
        )
        return Handover(scheduler, arrivals=arrivals, connectors=tuple(connectors.values()))
    offers = OfferBook(scheduler.transfer_blocks, copies, block_size=sizing.block_size)
    try:
        address = own.serve(offers)
    except OSError as error:
        raise StartError(f"kv-connector {own.name} cannot listen: {error.strerror or error}") from None
    most = max(1, int(options.kv_offer_share * sizing.kv.num_blocks))
    offers.terms = OfferTerms(own.name, address, layout, options.kv_offer_ttl_s, most)
    return Handover(scheduler, offers, connectors=(own,))


def layout_of(
    options: EngineOptions, block_size: int, model: PagedModel, directory: Path, config: Mapping[str, Any]
) -> bytes:
    """Return a digest, 16 bytes, of the facts that two engines must share to exchange blocks.

    The same model with other weights, a fine-tune say, is another one.
    """
    rotary = json.dumps(config.get("rope_scaling") or config.get("rope_parameters"), default=str)
    # Positions are turned by an angle that depends on the longest sequence.
    stretched = options.max_model_len if any(kind in rotary for kind in _STRETCHED) else None
    facts = (
        _LAYOUT_VERSION,
        block_size,
        str(model.dtype),
        model.backend,
        weights_fingerprint(directory),
        [(layer.kv_heads, layer.key_dim, layer.value_dim) for layer in model.layers],
        json.dumps(config, sort_keys=True, default=str),
        stretched,
    )
    return hashlib.blake2b(repr(facts).encode(), digest_size=16, person=b"catenary layout").digest()


def _tls(options: EngineOptions) -> TlsPaths | None:
    if options.tls_cert is None or options.tls_key is None or options.tls_ca is None:
        return None
    return TlsPaths(str(options.tls_cert), str(options.tls_key), str(options.tls_ca))


def _directory(options: EngineOptions) -> Path:
    # One for this user alone: others may write to the temporary directory, and to many a shared volume.
    if options.kv_transfer_directory:
        return expanded(options.kv_transfer_directory) / f"kv-{os.geteuid()}"
    return Path(tempfile.gettempdir()) / f"catenary-kv-{os.geteuid()}"
