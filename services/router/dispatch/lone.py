"""Sequences that are computed alone: engines died in their first forward, which must cost no neighbour."""

from __future__ import annotations

from collections import OrderedDict

from services.router.dispatch.sequence import LiveSequence
from services.router.fleet import Engine, Fleet


class LoneSequences:
    """Keeps engines for them: one that is kept is given nothing else, empties, and is theirs until their
    first token. One engine of a model at a time waits to become empty, so that the others go on."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.waiting: OrderedDict[LiveSequence, None] = OrderedDict()
        self._kept: dict[LiveSequence, Engine] = {}

    def wait(self, sequence: LiveSequence) -> None:
        """No engine of its model is empty: keep one for it, if none is kept for another."""
        self.waiting[sequence] = None
        request = sequence.request
        kept = self._kept.get(sequence)
        if kept is not None and kept.available and any(engine is kept for engine in self._fleet):
            return
        self._give_back(sequence)
        if any(other.spec.model == request.model for other in self._kept if other in self.waiting):
            return
        candidates = self._fleet.candidates(request.model, role=request.role)
        free = [engine for engine in candidates if engine.kept_for is None]
        if free:
            self._keep(sequence, min(free, key=lambda engine: engine.sequences))

    def placed(self, sequence: LiveSequence, engine: Engine) -> None:
        """It has an engine, which gets nothing else."""
        self.waiting.pop(sequence, None)
        self._give_back(sequence)
        self._keep(sequence, engine)

    def over(self, sequence: LiveSequence) -> None:
        """It may have company from here on, or is gone. Idempotent."""
        self.waiting.pop(sequence, None)
        self._give_back(sequence)

    def _keep(self, sequence: LiveSequence, engine: Engine) -> None:
        self._kept[sequence] = engine
        engine.kept_for = sequence.request

    def _give_back(self, sequence: LiveSequence) -> None:
        engine = self._kept.pop(sequence, None)
        if engine is not None:
            engine.kept_for = None
