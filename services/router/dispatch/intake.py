"""Sequences before an engine has them: placed at once, or waiting until there is room."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass

from catenary.v1 import common_pb2
from services.router.admission import Refused, sequences_of, validate_task
from services.router.dispatch.sequence import LiveSequence
from services.router.fleet import Engine
from services.router.placement import PlacementRequest, Placer

Send = Callable[[LiveSequence, Engine], None]
CallSoon = Callable[[Callable[[], None]], object]


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Bounds of what waits. `max_wait_s`: longest wait of a sequence that brings no time of its own."""

    max_queued: int
    max_wait_s: float
    retry_after_ms: int


@dataclass(slots=True, eq=False)
class _Waiting:
    sequence: LiveSequence
    deadline: float


class Intake:
    """Gives sequences to engines, in their order of arrival for each model.

    `send` takes a sequence that has an engine, `refuse` one that has waited in vain. Nothing here awaits.
    """

    def __init__(
        self,
        placer: Placer,
        limits: QueueLimits,
        *,
        send: Send,
        refuse: Callable[[LiveSequence, common_pb2.Error], None],
        clock: Callable[[], float],
        call_soon: CallSoon | None = None,
    ) -> None:
        self._placer = placer
        self._limits = limits
        self._send = send
        self._refuse = refuse
        self._clock = clock
        self._call_soon = call_soon
        self._queues: dict[str, OrderedDict[LiveSequence, _Waiting]] = {}
        self._queued = 0
        self._pump_due = False

    @property
    def queued(self) -> int:
        """Sequences that wait."""
        return self._queued

    def enter(self, sequence: LiveSequence) -> None:
        """Place a new sequence at once, or let it wait.

        Raises:
            Refused: it can neither be placed nor wait.
        """
        model = sequence.spec.model
        if model not in self._queues:
            try:
                self._place(sequence)
                return
            except Refused as refusal:
                if refusal.error.code != common_pb2.ERROR_CODE_OVERLOADED:
                    raise
        if self._queued >= self._limits.max_queued and not sequence.resumed:
            raise self._full()
        queue = self._queues.setdefault(model, OrderedDict())
        queue[sequence] = _Waiting(sequence, self._clock() + self._wait_s(sequence))
        if sequence.resumed:
            queue.move_to_end(sequence, last=False)
        self._queued += 1
        self.pump_soon()

    def place_again(self, sequence: LiveSequence, *, excluding: Collection[Engine]) -> bool:
        """Give a sequence that an engine refused to another one. False if none can take it."""
        try:
            self._place(sequence, excluding=excluding)
        except Refused:
            return False
        return True

    def withdraw(self, sequence: LiveSequence) -> None:
        """It waits no longer."""
        self._remove(sequence)
        self.pump_soon()

    def refuse_all(self, error: common_pb2.Error) -> None:
        """Nothing waits any longer."""
        for sequence in [sequence for queue in self._queues.values() for sequence in queue]:
            self._remove(sequence)
            self._refuse(sequence, error)

    def pump_soon(self) -> None:
        """Look for room at the end of this tick of the loop, once for all that freed some."""
        if self._queued and not self._pump_due:
            self._pump_due = True
            (self._call_soon or asyncio.get_running_loop().call_soon)(self.pump)

    def pump(self) -> None:
        """Place what there is room for, and refuse what has waited too long."""
        self._pump_due = False
        self._expire()
        for queue in list(self._queues.values()):
            while queue and self._admit(next(iter(queue))):
                pass

    def _admit(self, sequence: LiveSequence) -> bool:
        """Place the first one of a model. False: nothing of this model can be placed now."""
        try:
            self._place(sequence)
        except Refused as refusal:
            if refusal.error.code == common_pb2.ERROR_CODE_OVERLOADED:
                return False
            self._remove(sequence)
            self._refuse(sequence, refusal.error)
            return True
        self._remove(sequence)
        return True

    def _expire(self) -> None:
        now = self._clock()
        for queue in list(self._queues.values()):
            for waiting in [one for one in queue.values() if one.deadline <= now]:
                self._remove(waiting.sequence)
                self._refuse(waiting.sequence, self._too_late(waiting.sequence).error)

    def _remove(self, sequence: LiveSequence) -> None:
        queue = self._queues[sequence.spec.model]
        del queue[sequence]
        self._queued -= 1
        if not queue:
            del self._queues[sequence.spec.model]

    def _place(self, sequence: LiveSequence, *, excluding: Collection[Engine] = ()) -> None:
        request, leader = sequence.request, sequence.same_prompt_as
        request.beside = None if leader is None else leader.engine
        engine = self._placer.place(request, excluding=excluding).engine
        validate_task(sequence.spec, engine.model)
        self._send(sequence, engine)

    def _wait_s(self, sequence: LiveSequence) -> float:
        limit = self._limits.max_wait_s
        if sequence.spec.HasField("max_wait_ms"):
            return min(limit, sequence.spec.max_wait_ms / 1000)
        return limit

    def _full(self) -> Refused:
        return Refused(
            common_pb2.ERROR_CODE_OVERLOADED,
            f"The router's queue is full: its limit is {self._limits.max_queued} sequences (max-queued). "
            "Try again later.",
            retryable=True,
            retry_after_ms=self._limits.retry_after_ms,
        )

    def _too_late(self, sequence: LiveSequence) -> Refused:
        return Refused(
            common_pb2.ERROR_CODE_TIMEOUT,
            f"No engine had room for the request within {self._wait_s(sequence):g} seconds (max-wait-s).",
            retryable=True,
            retry_after_ms=self._limits.retry_after_ms,
        )


def placement_request(spec: common_pb2.SequenceSpec, *, alone: bool = False) -> PlacementRequest:
    """What placement is asked with for a sequence."""
    return PlacementRequest(
        request_id=spec.request_id,
        model=spec.model,
        token_ids=spec.token_ids,
        prompt_len=spec.prompt_len if spec.HasField("prompt_len") else len(spec.token_ids),
        salt=spec.cache_salt.encode(),
        session_id=spec.session_id,
        sequences=sequences_of(spec),
        alone=alone,
    )
