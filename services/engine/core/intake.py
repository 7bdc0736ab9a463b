"""How sequences come in: checked, then to the scheduler at once, or when what they wait for is there."""

from __future__ import annotations

from itertools import chain
from math import isfinite

from services.engine.core.beams import BeamSearches
from services.engine.core.columns import StepBuilder
from services.engine.core.constraints import ConstrainedSequences
from services.engine.core.handover import Handover, prompt_alone
from services.engine.core.startup import Engine
from services.engine.domain import BeamOptions, CoreErrorCode, FinishReason
from services.engine.link import SubmitSequence
from services.engine.scheduler import Finished, QueueFull, Sequence, SequenceRefused, sequence_from


def check_beams(options: BeamOptions, message: SubmitSequence, max_width: int) -> None:
    """Raises SequenceRefused for a beam search that is malformed or wider than the engine takes."""
    if not 1 <= options.width <= max_width:
        raise _invalid(f"a search of {options.width} beams is outside 1 to {max_width} (max_beam_width)")
    if not 1 <= options.results <= options.width:
        raise _invalid(f"{options.results} results of {options.width} beams")
    if not isfinite(options.length_penalty):
        raise _invalid("length_penalty is not a number")
    if message.prompt_len != len(message.token_ids):
        raise _invalid("a beam search emits nothing that it could be resumed with")


def _invalid(text: str) -> SequenceRefused:
    return SequenceRefused(CoreErrorCode.INVALID_ARGUMENT, text)


def check_token_ids(message: SubmitSequence, vocab_size: int) -> None:
    """Raises SequenceRefused for an id that indexes no logit: a negative one would mean another's."""
    sampling = message.sampling
    lists = {
        "the sequence": message.token_ids,
        "stop_token_ids": message.stop_token_ids,
        "logit_bias": [token for token, _ in sampling.logit_bias],
        "bad_words": list(chain.from_iterable(sampling.bad_words)),
        "allowed_token_ids": sampling.allowed_token_ids,
    }
    for name, ids in lists.items():
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            raise SequenceRefused(
                CoreErrorCode.INVALID_ARGUMENT,
                f"a token id of {name} is outside the vocabulary of {vocab_size} tokens",
            )


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
