"""Prompts whose KV another engine has: fetched beside the loop, while their sequences wait for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

from catenary.schema import KV_TICKET_BYTES
from catenary.telemetry import get_logger
from catenary.transfer import Connector, Fetch, TransferFault, host_id
from services.engine.core.fetching import Arrival, Chunk, Fetched, Fetching, Waiting, Written
from services.engine.link import OfferedKv, SubmitSequence
from services.engine.runner import BlockCopies
from services.engine.scheduler import Scheduler, Sequence, prompt_name

# A connector keeps its deadline; one that was plugged in may not.
_OVERTIME_S: Final = 1.0

log = get_logger(__name__)


class Arrivals:
    """All prompts on their way. Its methods are the loop's; threads talk to it by news.

    Whatever goes wrong, the sequence goes on without: its prompt is computed here.
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
        """Sequences that wait here."""
        return len(self._ready) + sum(1 + len(arrival.followers) for arrival in self._live.values())

    def attach(self, wake: Callable[[], None]) -> None:
        """Tells what wakes the loop, from any thread."""
        self._fetching.wake = wake

    @property
    def fetching(self) -> int:
        """Prompts on their way."""
        return len(self._live)

    def begin(self, sequence: Sequence, message: SubmitSequence) -> bool:
        """True if the sequence waits here: for its KV, or for one with the same prompt that does."""
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
        """Takes those that go on, with their KV or without, in an order in which leaders come first."""
        ready, self._ready = self._ready, []
        return ready

    def abort(self, key: int) -> Sequence | None:
        """Takes out one that waits, and returns it."""
        arrival = self._live.get(key)
        if arrival is not None:
            self._end(arrival)
            self._ready += arrival.followers
            return arrival.sequence
        for places in (self._ready, *(one.followers for one in self._live.values())):
            for place, (sequence, _) in enumerate(places):
                if sequence.key == key:
                    del places[place]
                    self._scheduler.kept.release(key)
                    return sequence
        return None

    def patience(self) -> float | None:
        """Seconds until something is to be done; None: until a thread wakes the loop."""
        if self._fetching.news or self._ready:
            return 0.0
        limits = [arrival.fetch.deadline for arrival in self._live.values()]
        return max(0.0, min(limits) + _OVERTIME_S - self._clock()) if limits else None

    def turn(self) -> None:
        """Takes what the threads say, and gives the device what arrived."""
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
        """Ends the threads as soon as they look up."""
        for arrival in self._live.values():
            arrival.cancelled = True
        self._fetching.close()

    def _begin(self, sequence: Sequence, message: SubmitSequence, offer: OfferedKv) -> TransferFault | None:
        connector = self._connectors.get(offer.connector)
        if connector is None:
            return TransferFault.CONNECTOR
        if (fault := self._misfit(message, offer)) is not None:
            return fault
        expected = self._scheduler.expect(sequence)
        blocks = offer.blocks if expected is None else len(expected.blocks)
        hits = blocks if expected is None else expected.hits
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
        if expected is None or not fetch.count:
            self._fetching.decline(connector, fetch)
            if expected is None:
                return TransferFault.NO_BLOCKS
            self._scheduler.arrived(sequence, expected)
            return None
        arrival = self._live[sequence.key] = Arrival(sequence, message, expected, fetch, connector)
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

        self._copies.write(arrival.expected.blocks[chunk.first : chunk.first + count], chunk.data, done)

    def _holds(self, arrival: Arrival) -> bool:
        """Whether its blocks were not given up."""
        return self._scheduler.kept.table(arrival.sequence.key) is arrival.expected.blocks

    def _complete(self, arrival: Arrival) -> None:
        """Lets the sequence go on if all of its KV is there."""
        if not arrival.whole or arrival.cancelled:
            return
        if not self._scheduler.arrived(arrival.sequence, arrival.expected):
            self._fail(arrival, TransferFault.NO_BLOCKS)
            return
        del self._live[arrival.sequence.key]
        self._ready += [(arrival.sequence, arrival.message), *arrival.followers]

    def _fail(self, arrival: Arrival, fault: TransferFault) -> None:
        """Lets the sequence go on without the KV."""
        if arrival.cancelled:
            return
        self._count(fault, arrival.sequence.key)
        self._end(arrival)
        self._ready += [(arrival.sequence, arrival.message), *arrival.followers]

    def _end(self, arrival: Arrival) -> None:
        """Frees what it holds; its thread ends when it looks up."""
        arrival.cancelled = True
        arrival.ahead.release()
        del self._live[arrival.sequence.key]
        self._scheduler.kept.release(arrival.sequence.key)

    def _count(self, fault: TransferFault, key: int) -> None:
        self.faults[fault.value] = self.faults.get(fault.value, 0) + 1
        log.info("a prompt is computed whose KV did not come", sequence=key, fault=fault.value)
