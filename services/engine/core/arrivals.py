"""KV that is on its way from other engines, and the threads that fetch it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Final

from catenary.schema import KV_TICKET_BYTES
from catenary.telemetry import get_logger
from catenary.transfer import Connector, Fetch, TransferError, TransferFault, host_id, window_of
from services.engine.link import OfferedKv, SubmitSequence
from services.engine.runner import BlockCopies
from services.engine.scheduler import IncomingPrefix, Scheduler, Sequence, prompt_name

log = get_logger(__name__)


Work = Callable[[], None]

# A fetch at work then waits for another engine, for which the end of a process should not wait.
_CLOSING_S = 1.0


class Fetchers:
    """Up to `count` threads, started on demand. The end of the process does not wait for them."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._queue: SimpleQueue[Work | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def run(self, work: Work) -> None:
        """Run `work` when a thread is free. Errors are logged."""
        self._queue.put(work)
        if len(self._threads) < self._count:
            thread = threading.Thread(target=self._work, name="kv fetch", daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        """Let each thread end after its present work, and wait for that for a moment.

        A thread that wakes up while the interpreter ends is unwound by it, which C++ answers with an abort.
        """
        for _ in self._threads:
            self._queue.put(None)
        until = time.monotonic() + _CLOSING_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _work(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except TransferError as error:
                log.debug("an offer was not given back", fault=error.fault.value)
            except Exception:
                log.exception("a connector failed")


# Before a busy engine is asked again; the pause doubles.
_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 0.4

Waiting = tuple[Sequence, SubmitSequence]
"""A sequence outside of the scheduler, with its submission."""


@dataclass(eq=False, slots=True)
class Arrival:
    """KV of one prompt on its way. `followers` have the same prompt and wait for it."""

    sequence: Sequence
    message: SubmitSequence
    incoming: IncomingPrefix
    fetch: Fetch
    connector: Connector
    # Places for chunks that have arrived and that the device has not copied yet.
    ahead: threading.Semaphore = field(init=False)
    followers: list[Waiting] = field(default_factory=list)
    # Set by the loop: the KV is not wanted any more.
    cancelled: bool = False
    # Blocks that came, and those of them that are on the device.
    came: int = 0
    written: int = 0
    fetched: bool = False

    def __post_init__(self) -> None:
        self.ahead = threading.Semaphore(window_of(self.fetch.chunk_blocks * self.fetch.block_bytes))

    @property
    def whole(self) -> bool:
        """True if all of the KV is on the device."""
        return self.fetched and self.written == self.fetch.count


@dataclass(frozen=True, slots=True)
class Chunk:
    """News: blocks that came, from the arrival's block `first` on."""

    arrival: Arrival
    first: int
    data: memoryview


@dataclass(frozen=True, slots=True)
class Written:
    """News: the device has written so many blocks, or failed."""

    arrival: Arrival
    count: int
    error: Exception | None


@dataclass(frozen=True, slots=True)
class Fetched:
    """News: the fetch is over."""

    arrival: Arrival
    fault: TransferFault | None


class Fetching:
    """Threads that fetch for the loop, which reads their `news`.

    A chunk waits in its thread until there is a place for it, so that what has come is bounded.
    """

    def __init__(self, max_transfers: int, clock: Callable[[], float]) -> None:
        self._fetchers = Fetchers(max_transfers)
        self._clock = clock
        self.news: deque[Chunk | Written | Fetched] = deque()
        self.wake: Callable[[], None] = lambda: None

    def begin(self, arrival: Arrival) -> None:
        """Fetch all chunks of a prompt, in a thread."""
        self._fetchers.run(lambda: self._fetch(arrival))

    def decline(self, connector: Connector, fetch: Fetch) -> None:
        """Tell the other engine, without waiting, that it need not keep its offer."""
        self._fetchers.run(lambda: connector.fetch(fetch, lambda _: None))

    def tell(self, news: Chunk | Written | Fetched) -> None:
        """Pass news to the loop, from any thread."""
        self.news.append(news)
        self.wake()

    def close(self) -> None:
        """Tell the threads to end."""
        self._fetchers.close()

    def _fetch(self, arrival: Arrival) -> None:
        fault: TransferFault | None = None
        try:
            self._ask(arrival)
        except TransferError as error:
            fault = error.fault
            log.debug("KV did not arrive", fault=fault.value, reason=str(error))
        except Exception:
            fault = TransferFault.PROTOCOL
            log.exception("a connector failed", connector=arrival.connector.name)
        self.tell(Fetched(arrival, fault))

    def _ask(self, arrival: Arrival) -> None:
        """Fetch; ask an engine again that has no room for one more transfer."""
        pause = _FIRST_PAUSE_S
        while not arrival.cancelled:
            try:
                arrival.connector.fetch(arrival.fetch, lambda data: self._put(arrival, data))
                return
            except TransferError as error:
                left = arrival.fetch.deadline - self._clock()
                if error.fault is not TransferFault.BUSY or left <= pause:
                    raise
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _put(self, arrival: Arrival, data: memoryview) -> None:
        left = arrival.fetch.deadline - self._clock()
        if not arrival.ahead.acquire(timeout=max(0.0, left)):
            raise TransferError(TransferFault.TIMEOUT, "the engine did not come to write blocks")
        if arrival.cancelled:
            raise TransferError(TransferFault.GONE, "the KV is not wanted any more")
        count = len(data) // arrival.fetch.block_bytes
        first = arrival.fetch.first + arrival.came
        arrival.came += count
        if not count or len(data) % arrival.fetch.block_bytes or arrival.came > arrival.fetch.count:
            raise TransferError(TransferFault.PROTOCOL, "the connector gave other blocks than were asked for")
        self.tell(Chunk(arrival, first, data))


# A connector keeps its deadline; one that was plugged in may not.
_OVERTIME_S: Final = 1.0


class Arrivals:
    """All prompts on their way. Called from the loop's thread; other threads send news.

    Whatever goes wrong, the sequence is queued without its KV: its prompt is computed here.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        copies: BlockCopies,
        connectors: Mapping[str, Connector],
        *,
        layout: bytes,
        block_size: int,
        timeout_s: float,
        max_transfers: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._copies = copies
        self._connectors = connectors
        self._layout = layout
        self._block_size = block_size
        self._timeout_s = timeout_s
        self._clock = clock
        self._host = host_id()
        self._fetching = Fetching(max_transfers, clock)
        self._live: dict[int, Arrival] = {}
        self._ready: list[Waiting] = []
        self.faults: dict[str, int] = {}
        self.bytes_received = 0

    def __len__(self) -> int:
        """Number of sequences that wait here."""
        return len(self._ready) + sum(1 + len(arrival.followers) for arrival in self._live.values())

    def attach(self, wake: Callable[[], None]) -> None:
        """Set the function that wakes the loop, from any thread."""
        self._fetching.wake = wake

    @property
    def fetching(self) -> int:
        """Prompts on their way."""
        return len(self._live)

    def begin(self, sequence: Sequence, message: SubmitSequence) -> bool:
        """Return True if the sequence waits here: for its KV, or for one with the same prompt that does."""
        leader = self._live.get(message.same_prompt_as)
        if message.kv_offer is None:
            if leader is not None:
                leader.followers.append((sequence, message))
            return leader is not None
        fault = self._begin(sequence, message, message.kv_offer)
        if fault is not None:
            self._count(fault, sequence.key)
        return sequence.key in self._live

    def ready(self) -> list[Waiting]:
        """Take the sequences that are to be queued, with their KV or without, leaders first."""
        ready, self._ready = self._ready, []
        return ready

    def abort(self, key: int) -> Sequence | None:
        """Take out a sequence that waits, and return it."""
        arrival = self._live.get(key)
        if arrival is not None:
            self._end(arrival)
            self._ready += arrival.followers
            return arrival.sequence
        for places in (self._ready, *(one.followers for one in self._live.values())):
            for place, (sequence, _) in enumerate(places):
                if sequence.key == key:
                    del places[place]
                    self._scheduler.transfer_blocks.release(key)
                    return sequence
        return None

    def patience(self) -> float | None:
        """Seconds until something is to be done; None: until a thread wakes the loop."""
        if self._fetching.news or self._ready:
            return 0.0
        limits = [arrival.fetch.deadline for arrival in self._live.values()]
        return max(0.0, min(limits) + _OVERTIME_S - self._clock()) if limits else None

    def turn(self) -> None:
        """Handle the news, and give the device the blocks that arrived."""
        writes, news = 0, self._fetching.news
        while news and writes < self._copies.per_turn:
            match news.popleft():
                case Chunk() as chunk:
                    writes += 1
                    self._write(chunk)
                case Written(arrival, count, error):
                    arrival.written += count
                    if error is not None:
                        log.warning("the device did not write blocks", error=type(error).__name__)
                        self._fail(arrival, TransferFault.DEVICE)
                    self._complete(arrival)
                case Fetched(arrival, fault):
                    arrival.fetched = True
                    if fault is None and arrival.came < arrival.fetch.count:
                        fault = TransferFault.PROTOCOL
                    if fault is not None:
                        self._fail(arrival, fault)
                    self._complete(arrival)
        late = self._clock() - _OVERTIME_S
        for arrival in [one for one in self._live.values() if one.fetch.deadline < late]:
            self._fail(arrival, TransferFault.TIMEOUT)

    def close(self) -> None:
        """Tell the threads to end."""
        for arrival in self._live.values():
            arrival.cancelled = True
        self._fetching.close()

    def _begin(self, sequence: Sequence, message: SubmitSequence, offer: OfferedKv) -> TransferFault | None:
        connector = self._connectors.get(offer.connector)
        if connector is None:
            return TransferFault.CONNECTOR
        if (fault := self._misfit(message, offer)) is not None:
            return fault
        incoming = self._scheduler.expect(sequence)
        blocks = offer.blocks if incoming is None else len(incoming.blocks)
        hits = blocks if incoming is None else incoming.hits
        fetch = Fetch(
            ticket=offer.ticket,
            address=offer.address,
            binding=prompt_name(sequence, offer.tokens, self._block_size),
            layout=self._layout,
            first=hits,
            count=blocks - hits,
            block_bytes=self._copies.block_bytes,
            chunk_blocks=self._copies.blocks,
            deadline=self._clock() + self._timeout_s,
        )
        if incoming is None or not fetch.count:
            self._fetching.decline(connector, fetch)
            if incoming is None:
                return TransferFault.NO_BLOCKS
            self._scheduler.arrived(sequence, incoming)
            return None
        arrival = self._live[sequence.key] = Arrival(sequence, message, incoming, fetch, connector)
        self._fetching.begin(arrival)
        return None

    def _misfit(self, message: SubmitSequence, offer: OfferedKv) -> TransferFault | None:
        if offer.connector == "shm" and offer.host_id != self._host:
            return TransferFault.HOST
        if offer.layout != self._layout:
            return TransferFault.LAYOUT
        blocks = -(-offer.tokens // self._block_size)
        whole = message.prompt_len == len(message.token_ids) == offer.tokens + 1
        scored = message.sampling.prompt_logprobs >= 0 or message.beams is not None
        if not whole or scored or offer.blocks != blocks or not blocks:
            return TransferFault.MISMATCH
        return None if len(offer.ticket) in KV_TICKET_BYTES else TransferFault.MISMATCH

    def _write(self, chunk: Chunk) -> None:
        arrival = chunk.arrival
        if arrival.cancelled:
            arrival.ahead.release()
            return
        if not self._holds(arrival):
            self._fail(arrival, TransferFault.NO_BLOCKS)
            return
        count = len(chunk.data) // arrival.fetch.block_bytes
        self.bytes_received += len(chunk.data)

        def done(error: Exception | None) -> None:
            arrival.ahead.release()
            self._fetching.tell(Written(arrival, count, error))

        self._copies.write(arrival.incoming.blocks[chunk.first : chunk.first + count], chunk.data, done)

    def _holds(self, arrival: Arrival) -> bool:
        """Return whether the arrival still has its blocks."""
        return self._scheduler.transfer_blocks.table(arrival.sequence.key) is arrival.incoming.blocks

    def _complete(self, arrival: Arrival) -> None:
        """Make the sequence ready if all of its KV is there."""
        if not arrival.whole or arrival.cancelled:
            return
        if not self._scheduler.arrived(arrival.sequence, arrival.incoming):
            self._fail(arrival, TransferFault.NO_BLOCKS)
            return
        del self._live[arrival.sequence.key]
        self._ready += [(arrival.sequence, arrival.message), *arrival.followers]

    def _fail(self, arrival: Arrival, fault: TransferFault) -> None:
        """Make the sequence ready without the KV."""
        if arrival.cancelled:
            return
        self._count(fault, arrival.sequence.key)
        self._end(arrival)
        self._ready += [(arrival.sequence, arrival.message), *arrival.followers]

    def _end(self, arrival: Arrival) -> None:
        """Free the arrival's blocks and tell its thread to end."""
        arrival.cancelled = True
        arrival.ahead.release()
        del self._live[arrival.sequence.key]
        self._scheduler.transfer_blocks.release(arrival.sequence.key)

    def _count(self, fault: TransferFault, key: int) -> None:
        self.faults[fault.value] = self.faults.get(fault.value, 0) + 1
        log.info("a prompt is computed whose KV did not come", sequence=key, fault=fault.value)
