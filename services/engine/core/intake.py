"""How sequences come in: checked, then to the scheduler at once, or when what they wait for is there."""

from __future__ import annotations

from services.engine.core.beams import BeamSearches
from services.engine.core.checks import check_beams, check_token_ids
from services.engine.core.columns import StepBuilder
from services.engine.core.constrained import ConstrainedSequences
from services.engine.core.handover import Handover, prompt_alone
from services.engine.core.startup import Engine
from services.engine.domain import CoreErrorCode, FinishReason
from services.engine.link import SubmitSequence
from services.engine.scheduler import Finished, QueueFull, Sequence, SequenceRefused, sequence_from


class Intake:
    """Takes sequences and aborts of the link. What it refuses or ends is told in the step's columns."""

    def __init__(
        self,
        engine: Engine,
        step: StepBuilder,
        beams: BeamSearches,
        constrained: ConstrainedSequences,
    ) -> None:
        self._scheduler = engine.scheduler
        self._handover: Handover = engine.handover
        self._vocab_size = engine.ready.model.vocab_size
        self._eos_token_ids = engine.ready.model.eos_token_ids
        self._max_beam_width = engine.max_beam_width
        self._step = step
        self._beams = beams
        self._constrained = constrained

    def submit(self, message: SubmitSequence) -> None:
        """Takes a sequence: it runs, or waits for KV, or for its constraint."""
        sequence = sequence_from(message, self._eos_token_ids)
        try:
            check_token_ids(message, self._vocab_size)
        except SequenceRefused as refusal:
            self._refuse(sequence, refusal.code, refusal.message, refusal.param)
            return
        if not self._handover.begin(sequence, message):
            self._enter(sequence, message)

    def admit(self) -> bool:
        """Lets those go on that have what they waited for. True if blocks came free meanwhile."""
        arrived, freed = self._handover.turn()
        for sequence, message in arrived:
            self._enter(sequence, message)
        self._constrained.admit()
        return freed

    def abort(self, key: int) -> None:
        """Ends a sequence wherever it is, and withdraws what one that has ended offers."""
        finished = self._scheduler.end(key, FinishReason.ABORT)
        if finished is not None:
            self._beams.forget(key)
            self._step.add_outcome(finished, None)
            self._constrained.forget(key)
        elif (waiting := self._handover.abort(key)) is not None:
            waiting.finish()
            self._step.add_outcome(Finished(waiting, None, FinishReason.ABORT), None)
        else:
            self._constrained.abort(key)

    def _enter(self, sequence: Sequence, message: SubmitSequence) -> None:
        """Queues a sequence, or lets it wait for its constraint."""
        try:
            given, leader = message.constraint, message.same_prompt_as
            if message.prefill_only:
                self._scheduler.add(prompt_alone(message))
            elif message.beams is not None:
                check_beams(message.beams, message, self._max_beam_width)
                self._beams.submit(message, message.beams)
            elif given is None or self._constrained.add(sequence, given, leader):
                self._scheduler.add(sequence, leader or None)
        except SequenceRefused as refusal:
            self._refuse(sequence, refusal.code, refusal.message, refusal.param)
        except QueueFull as refusal:
            self._refuse(sequence, CoreErrorCode.OVERLOADED, str(refusal))

    def _refuse(
        self, sequence: Sequence, code: CoreErrorCode, message: str, param: str | None = None
    ) -> None:
        self._step.add_failure(sequence, code, message, param)
        self._constrained.forget(sequence.key)
        self._handover.forget(sequence.key)
