"""Constraints of sequences: compiled beside the loop, applied to its steps as masks."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from catenary.constraints import ConstraintLimits
from catenary.telemetry import get_logger
from services.engine.constraints import (
    ConstraintCompiler,
    ConstraintRefused,
    Constraints,
    GuidanceBackend,
    Taken,
    VocabularyError,
    open_xgrammar,
    read_vocabulary,
)
from services.engine.core.outputs import StepBuilder
from services.engine.domain import ConstraintOptions, CoreErrorCode, FinishReason
from services.engine.link import ConstraintLoad
from services.engine.model import DirectoryFacts
from services.engine.options import EngineOptions
from services.engine.runner import LaunchedStep
from services.engine.sampling import TokenMasks
from services.engine.scheduler import (
    Finished,
    Outcome,
    QueueFull,
    Scheduler,
    Sequence,
    SequenceRefused,
    StepPlan,
)
from services.engine.tracing import StepTracer

log = get_logger(__name__)


_MOST_THREADS = 8


@dataclass(frozen=True, slots=True)
class Grammars:
    """A compiler, and how many sequences may wait for it, and how many seconds each.

    Without a compiler constrained sequences are refused.
    """

    compiler: ConstraintCompiler | None = None
    queue: int = 0
    timeout_s: float = 0.0

    def constraints(self, wake: Callable[[], None]) -> Constraints:
        """The constraints of a loop that `wake` wakes from any thread."""
        return Constraints(self.compiler, limit=self.queue, seconds=self.timeout_s, wake=wake)

    def close(self) -> None:
        """Ends the compiler's threads."""
        if self.compiler is not None:
            self.compiler.close()


NO_GRAMMARS = Grammars()


def open_grammars(options: EngineOptions, directory: Path, width: int, facts: DirectoryFacts) -> Grammars:
    """The grammars for a model with logits of this width; none if its tokenizer does not allow it.

    Raises ValueError if the backend is not installed.

    Takes up to a second, in which no other thread runs: so before the engine serves.
    """
    if not (directory / "tokenizer.json").is_file():
        log.info("the model has no tokenizer.json: its sequences cannot be constrained")
        return NO_GRAMMARS
    try:
        vocabulary = read_vocabulary(directory, width, facts.eos_token_ids)
    except VocabularyError as error:
        log.warning("the model cannot be given constraints", reason=str(error))
        return NO_GRAMMARS
    threads = options.grammar_threads or max(1, min(_MOST_THREADS, (os.cpu_count() or 1) // 2))
    makers = {"llguidance": GuidanceBackend, "xgrammar": open_xgrammar}
    limits = ConstraintLimits(max_digits=options.grammar_number_digits)
    compiler = ConstraintCompiler(
        makers[options.grammar_backend](vocabulary, threads, limits),
        vocabulary,
        threads=threads,
        queue=options.grammar_queue,
        cached=options.grammar_cache,
        cached_bytes=options.grammar_cache_kib << 10,
        number_digits=options.grammar_number_digits,
    )
    return Grammars(compiler, options.grammar_queue, options.grammar_timeout_s)


_PARAM = "constraint"
_FAILED = "The constraint cannot be followed any further within the engine's limits."
_NOTHING_LEFT = (
    "The constraint, allowed_token_ids, bad_words and min_tokens leave no token that could follow."
)


class ConstrainedSequences:
    """Joins the constraints to the scheduler, and tells of what ends in the step's columns.

    `let_go` is told of each that ended before the scheduler had it.
    """

    def __init__(
        self,
        constraints: Constraints,
        scheduler: Scheduler,
        step: StepBuilder,
        tracer: StepTracer,
        let_go: Callable[[int], None],
    ) -> None:
        self._constraints = constraints
        self._scheduler = scheduler
        self._step = step
        self._tracer = tracer
        self._let_go = let_go
        # Of those that wait: with whom they share a prompt.
        self._same_prompt_as: dict[int, int] = {}

    def __len__(self) -> int:
        """Sequences that wait for their constraints."""
        return len(self._constraints.waiting)

    @property
    def tokens(self) -> int:
        """Those of the sequences that wait."""
        return self._constraints.waiting.tokens

    @property
    def patience(self) -> float | None:
        """Seconds until one of them has waited too long; None if none waits."""
        return self._constraints.waiting.patience

    @property
    def load(self) -> ConstraintLoad:
        """For reports."""
        return self._constraints.load()

    def add(self, sequence: Sequence, options: ConstraintOptions, same_prompt_as: int) -> bool:
        """True if the sequence may run now; else `admit` queues it. Raises SequenceRefused, QueueFull."""
        try:
            runs = self._constraints.add(sequence, options)
        except ConstraintRefused as refusal:
            raise SequenceRefused(CoreErrorCode.INVALID_ARGUMENT, str(refusal), _PARAM) from None
        if not runs:
            self._same_prompt_as[sequence.key] = same_prompt_as
        return runs

    def admit(self) -> None:
        """Queues those whose constraints were compiled since the last time."""
        for sequence, refusal in self._constraints.ready():
            same_prompt_as = self._same_prompt_as.pop(sequence.key)
            if refusal is not None:
                self._refuse(sequence, CoreErrorCode.INVALID_ARGUMENT, str(refusal), _PARAM)
                continue
            try:
                self._scheduler.add(sequence, same_prompt_as or None)
            except SequenceRefused as refused:
                self._refuse(sequence, refused.code, refused.message, refused.param)
            except QueueFull as full:
                self._refuse(sequence, CoreErrorCode.OVERLOADED, str(full))

    def _refuse(
        self, sequence: Sequence, code: CoreErrorCode, message: str, param: str | None = None
    ) -> None:
        self._constraints.forget(sequence.key)
        self._let_go(sequence.key)
        self._step.add_failure(sequence, code, message, param)

    def abort(self, key: int) -> None:
        """Ends one that waits."""
        sequence = self._constraints.waiting.remove(key)
        if sequence is not None:
            del self._same_prompt_as[key]
            self._let_go(key)
            sequence.finish()
            self._step.add_outcome(Finished(sequence, None, FinishReason.ABORT), None)

    def forget(self, key: int) -> None:
        """Told of any sequence that ended."""
        self._constraints.forget(key)

    def concern(self, plan: StepPlan) -> bool:
        """True if the plan samples for a constrained sequence."""
        return self._constraints.concern(plan)

    def restrict(self, step: LaunchedStep) -> None:
        """Launches the rest of a step whose forwards were, with masks after all tokens before it."""
        if not step.awaits_masks:
            return
        with self._tracer.span("masks", step.number):
            found = self._constraints.masks(step.plan)
        for sequence in () if found is None else found.failed:
            self._fail(sequence, _FAILED)
        step.sample(None if found is None else TokenMasks(found.rows, found.bits))

    def follow(self, outcome: Outcome) -> Outcome | None:
        """What a token of a constrained sequence comes to; None if the sequence failed by it."""
        sequence, token_id = outcome.sequence, outcome.token_id
        taken = Taken.GOES_ON
        if token_id is not None:
            taken = self._constraints.take(sequence, token_id)
        if taken is Taken.ENDED:
            # The scheduler, which does not know what is complete, ends no constrained sequence by a stop id.
            self._scheduler.end(sequence.key, FinishReason.STOP)
            outcome = Finished(sequence, token_id, FinishReason.STOP, token_id)
        elif taken is Taken.FAILED and not sequence.finished:
            self._fail(sequence, _FAILED)
            return None
        if isinstance(outcome, Finished):
            self.forget(sequence.key)
        return outcome

    def end_stuck(self, sequence: Sequence) -> bool:
        """Ends one for which no token is left: its text may be complete. False if it is not constrained."""
        if not sequence.constrained:
            return False
        if not self._constraints.complete(sequence):
            self._fail(sequence, _NOTHING_LEFT)
            return True
        finished = self._scheduler.end(sequence.key, FinishReason.STOP)
        if finished is not None:
            self._step.add_outcome(finished, None)
            self.forget(sequence.key)
        return True

    def _fail(self, sequence: Sequence, message: str) -> None:
        self.forget(sequence.key)
        if self._scheduler.end(sequence.key, FinishReason.ERROR) is not None:
            self._step.add_failure(sequence, CoreErrorCode.INVALID_ARGUMENT, message, _PARAM)
