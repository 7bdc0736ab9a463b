"""Sequences that are computed alone: engines died in their first forward, which must cost no neighbour."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator

from services.router.dispatch.engine_links import EngineLinks
from services.router.dispatch.sequence import LiveSequence
from services.router.fleet import Engine, Fleet


class LoneSequences:
    """Keeps engines for them: one that is kept is given nothing else, empties, and is theirs until their
    first token. They take turns: the first of a model that waits has one engine kept, so that the others go
    on."""

    def __init__(self, fleet: Fleet, links: EngineLinks) -> None:
        self._fleet = fleet
        self._links = links
        # Of each model, in the order in which they came.
        self._waiting: defaultdict[str, OrderedDict[LiveSequence, None]] = defaultdict(OrderedDict)
        self._kept: dict[LiveSequence, Engine] = {}

    def waits(self, model: str) -> bool:
        """Whether one of this model waits."""
        return model in self._waiting

    def firsts(self) -> Iterator[LiveSequence]:
        """Whose turn it is, of each model; the next of a model if that one no longer waits by then."""
        for model in list(self._waiting):
            last = None
            while (row := self._waiting.get(model)) and (first := next(iter(row))) is not last:
                yield first
                last = first

    def wait(self, sequence: LiveSequence) -> None:
        """No engine of its model is empty: keep one for it, if it is its turn."""
        request = sequence.request
        row = self._waiting[request.model]
        row[sequence] = None
        kept = self._kept.get(sequence)
        if kept is not None and kept.available and any(engine is kept for engine in self._fleet):
            return
        self._give_back(sequence)
        if next(iter(row)) is not sequence:
            return
        candidates = self._fleet.candidates(request.model)
        free = [engine for engine in candidates if engine.kept_for is None]
        if free:
            self._keep(sequence, min(free, key=lambda engine: engine.sequences))

    def placed(self, sequence: LiveSequence, engine: Engine) -> None:
        """It has an engine, which gets nothing else."""
        if self._kept.get(sequence) is engine:
            # Not given back and kept again: it would be another router's turn in between.
            self._waits_no_longer(sequence)
        else:
            self.over(sequence)
            self._keep(sequence, engine)

    def over(self, sequence: LiveSequence) -> None:
        """It may have company from here on, or is gone. Idempotent."""
        self._waits_no_longer(sequence)
        self._give_back(sequence)

    def _waits_no_longer(self, sequence: LiveSequence) -> None:
        model = sequence.request.model
        if (row := self._waiting.get(model)) is not None:
            row.pop(sequence, None)
            if not row:
                del self._waiting[model]

    def _keep(self, sequence: LiveSequence, engine: Engine) -> None:
        self._kept[sequence] = engine
        self._links.keep(engine, sequence.request)

    def _give_back(self, sequence: LiveSequence) -> None:
        engine = self._kept.pop(sequence, None)
        if engine is not None:
            self._links.give_back(engine)
