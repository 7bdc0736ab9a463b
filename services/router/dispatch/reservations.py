"""Engines that are reserved for one sequence: nothing else is placed there, so they empty.

For a sequence in quarantine, which is computed alone since engines died in its first forward, and for one
that needs more room than any engine has now, lest sequences that need less starve it.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from itertools import islice

from catenary.v1 import engine_pb2
from services.router.admission import ModelQueue, QueuedSequence
from services.router.dispatch.sequence import EngineLink, LiveSequence
from services.router.fleet import Engine, Fleet

Entry = QueuedSequence[LiveSequence]


class EngineLinks:
    """The links of the connected engines, by which engines are also told that they are reserved."""

    def __init__(self) -> None:
        # By epoch: a link is that of one attachment.
        self._links: dict[int, EngineLink] = {}

    def connect(self, engine: Engine) -> EngineLink:
        """Open the link of an engine that is attached."""
        link = self._links[engine.epoch] = EngineLink(engine)
        return link

    def of(self, engine: Engine) -> EngineLink | None:
        """Return the link of an engine, or None if it is not connected."""
        return self._links.get(engine.epoch)

    def connected(self, engine: Engine) -> EngineLink:
        """Return the link of a connected engine. Raises KeyError for another one."""
        return self._links[engine.epoch]

    def drop(self, engine: Engine) -> None:
        """Forget an engine that is gone. Idempotent."""
        self._links.pop(engine.epoch, None)

    def reserve(self, engine: Engine, owner: object) -> None:
        """Give an engine nothing but `owner` from here on, and have it refuse what other routers submit."""
        engine.reserved_for = owner
        if (link := self.of(engine)) is not None:
            link.keep(wanted=True)

    def release(self, engine: Engine) -> None:
        """End the reservation of an engine."""
        engine.reserved_for = None
        if (link := self.of(engine)) is not None:
            link.keep(wanted=False)


class QuarantineQueue:
    """Sequences in quarantine that wait for an engine of their own, and the engines that have one.

    The first of a model that waits has an engine reserved, which empties; the others wait for their turn. The
    engine stays reserved until the first token of the sequence.
    """

    def __init__(self, fleet: Fleet, links: EngineLinks) -> None:
        self._fleet = fleet
        self._links = links
        # Of each model, in the order of arrival.
        self._waiting: defaultdict[str, OrderedDict[LiveSequence, None]] = defaultdict(OrderedDict)
        self._reserved: dict[LiveSequence, Engine] = {}

    def waits(self, model: str) -> bool:
        """Whether a sequence of this model waits."""
        return model in self._waiting

    def firsts(self) -> Iterator[LiveSequence]:
        """Yield the first of each model; the next of a model, too, if the first no longer waits by then."""
        for model in list(self._waiting):
            last = None
            while (row := self._waiting.get(model)) and (first := next(iter(row))) is not last:
                yield first
                last = first

    def wait(self, sequence: LiveSequence) -> None:
        """Let a sequence wait, as no engine of its model is empty; reserve one if it is the first."""
        request = sequence.request
        row = self._waiting[request.model]
        row[sequence] = None
        reserved = self._reserved.get(sequence)
        if reserved is not None and reserved.available and any(engine is reserved for engine in self._fleet):
            return
        self._release(sequence)
        if next(iter(row)) is not sequence:
            return
        free = [engine for engine in self._fleet.candidates(request.model) if engine.reserved_for is None]
        if free:
            self._reserve(sequence, min(free, key=lambda engine: engine.sequences))

    def placed(self, sequence: LiveSequence, engine: Engine) -> None:
        """Reserve the engine on which a sequence was placed."""
        if self._reserved.get(sequence) is engine:
            # Not released and reserved again: in between it would be another router's turn.
            self._stop_waiting(sequence)
        else:
            self.release(sequence)
            self._reserve(sequence, engine)

    def release(self, sequence: LiveSequence) -> None:
        """End the quarantine of a sequence that has its first token, or is gone. Idempotent."""
        self._stop_waiting(sequence)
        self._release(sequence)

    def _stop_waiting(self, sequence: LiveSequence) -> None:
        model = sequence.request.model
        if (row := self._waiting.get(model)) is not None:
            row.pop(sequence, None)
            if not row:
                del self._waiting[model]

    def _reserve(self, sequence: LiveSequence, engine: Engine) -> None:
        self._reserved[sequence] = engine
        self._links.reserve(engine, sequence.request)

    def _release(self, sequence: LiveSequence) -> None:
        engine = self._reserved.pop(sequence, None)
        if engine is not None:
            self._links.release(engine)


_ANY = engine_pb2.ENGINE_ROLE_UNSPECIFIED
# Sequences that overtake another one in one pump, and those that are looked at for that.
_OVERTAKING = 8
_LOOKED_AT = 256


class Reservations:
    """One engine of each model for the sequence at the head of the queue that no engine has room for."""

    def __init__(self, fleet: Fleet, links: EngineLinks) -> None:
        self._fleet = fleet
        self._links = links
        self._reserved: dict[str, tuple[LiveSequence, Engine]] = {}

    def room_elsewhere(self, model: str, sequences: int = 1, tokens: int = 1) -> bool:
        """Whether an engine that is not reserved has room for so many sequences with so many tokens of KV."""
        columns = self._fleet.columns(model)
        return bool((columns.open_to(_ANY) & columns.free_for(None) & columns.roomy(sequences, tokens)).any())

    def turn_of(self, sequence: LiveSequence) -> None:
        """Release an engine that is reserved for another sequence than this head of the queue."""
        reserved = self._reserved.get(sequence.request.model)
        if reserved is not None and reserved[0] is not sequence:
            self.release(reserved[0])

    def reserve(self, sequence: LiveSequence) -> bool:
        """Reserve the emptiest engine that can hold a sequence and compute all of it.

        Returns:
            False if there is none: sequences that overtake this one could starve it then.
        """
        request = sequence.request
        reserved = self._reserved.get(request.model)
        if reserved is not None:
            engine = reserved[1]
            if engine.available and self._fleet.find(engine.instance_id) is engine:
                return True
            self.release(sequence)
        free = [
            engine
            for engine in self._fleet.candidates(request.model)
            if engine.reserved_for is None and engine.kv_tokens >= request.kv_tokens
        ]
        if free:
            engine = min(free, key=_taken)
            self._links.reserve(engine, request)
            self._reserved[request.model] = sequence, engine
        return bool(free)

    def release(self, sequence: LiveSequence) -> None:
        """End the reservation of a sequence that no longer waits, or is no longer the head. Idempotent."""
        reserved = self._reserved.get(sequence.request.model)
        if reserved is not None and reserved[0] is sequence:
            del self._reserved[sequence.request.model]
            self._links.release(reserved[1])


def _taken(engine: Engine) -> float:
    """Return the share of an engine's slots or of its KV that is taken, whichever is larger."""
    return max(
        engine.sequences / max(1, engine.capacity.max_running), engine.kv.held / max(1, engine.kv_tokens)
    )


def smaller(queue: ModelQueue[LiveSequence], head: Entry) -> list[Entry]:
    """Return some sequences that wait behind `head` and need less room, in slots or in KV."""
    found = (
        entry
        for entry in islice(queue.lanes.behind(head, _LOOKED_AT), _LOOKED_AT)
        if (entry.sequences < head.sequences or _kv(entry) < _kv(head))
        and queue.quota.admits(entry.lane, entry.sequences)
    )
    return list(islice(found, _OVERTAKING))


def _kv(entry: Entry) -> int:
    return entry.item.request.kv_tokens
