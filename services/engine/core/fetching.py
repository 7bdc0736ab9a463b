"""One prompt's KV on its way from another engine, and the threads beside the loop that fetch it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from catenary.telemetry import get_logger
from catenary.transfer import Connector, Fetch, TransferError, TransferFault, window_of
from services.engine.core.fetchers import Fetchers
from services.engine.link import SubmitSequence
from services.engine.scheduler import Expected, Sequence

# Before a busy engine is asked again; the pause doubles.
_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 0.4

log = get_logger(__name__)

Waiting = tuple[Sequence, SubmitSequence]
"""A sequence outside of the scheduler, with what submitted it."""


@dataclass(eq=False, slots=True)
class Arrival:
    """One prompt on its way. `followers` have the same prompt and wait for it."""

    sequence: Sequence
    message: SubmitSequence
    expected: Expected
    fetch: Fetch
    connector: Connector
    # Places for chunks that have arrived and that the device has not copied yet.
    ahead: threading.Semaphore = field(init=False)
    followers: list[Waiting] = field(default_factory=list)
    # Set by the loop: nobody wants it any more.
    cancelled: bool = False
    # Blocks that came, and those of them that are on the device.
    came: int = 0
    written: int = 0
    fetched: bool = False

    def __post_init__(self) -> None:
        self.ahead = threading.Semaphore(window_of(self.fetch.chunk_blocks * self.fetch.block_bytes))

    @property
    def whole(self) -> bool:
        """Whether all of it is on the device."""
        return self.fetched and self.written == self.fetch.count


@dataclass(frozen=True, slots=True)
class Chunk:
    """Blocks that came, from the arrival's block `first` on."""

    arrival: Arrival
    first: int
    data: memoryview


@dataclass(frozen=True, slots=True)
class Written:
    """The device has so many of them, or failed."""

    arrival: Arrival
    count: int
    error: Exception | None


@dataclass(frozen=True, slots=True)
class Fetched:
    """Nothing more comes."""

    arrival: Arrival
    fault: TransferFault | None


class Fetching:
    """Fetches for the loop, which reads what its threads have to say from `news`.

    A chunk waits in its thread until there is a place for it, so that what has come is bounded.
    """

    def __init__(self, max_transfers: int, clock: Callable[[], float]) -> None:
        self._fetchers = Fetchers(max_transfers)
        self._clock = clock
        self.news: deque[Chunk | Written | Fetched] = deque()
        self.wake: Callable[[], None] = lambda: None

    def begin(self, arrival: Arrival) -> None:
        """Fetches all chunks of it, in a thread."""
        self._fetchers.run(lambda: self._fetch(arrival))

    def decline(self, connector: Connector, fetch: Fetch) -> None:
        """Tells the other engine that it need not keep what is offered; nobody waits until it knows."""
        self._fetchers.run(lambda: connector.fetch(fetch, lambda _: None))

    def tell(self, news: Chunk | Written | Fetched) -> None:
        """Gives the loop something to read. From any thread."""
        self.news.append(news)
        self.wake()

    def close(self) -> None:
        """Ends the threads as soon as they look up."""
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
        """Fetches; an engine that has no room for one more transfer is asked again."""
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
