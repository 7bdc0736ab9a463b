"""Constrained sequences of a core: compiled in other threads, waited for, applied to steps as masks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from catenary.constraints import ConstraintLimits
from catenary.telemetry import get_logger
from services.engine.constraints import (
    Bits,
    CompiledConstraint,
    ConstraintCompiler,
    ConstraintRefused,
    GuidanceBackend,
    Matcher,
    Restriction,
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
    """A compiler, or None to refuse constrained sequences. At most `queue` of them wait, each `timeout_s`."""

    compiler: ConstraintCompiler | None = None
    queue: int = 0
    timeout_s: float = 0.0

    def close(self) -> None:
        """End the compiler's threads."""
        if self.compiler is not None:
            self.compiler.close()


NO_GRAMMARS = Grammars()


def open_grammars(options: EngineOptions, directory: Path, width: int, facts: DirectoryFacts) -> Grammars:
    """Return the grammars for a model with logits of this width; none if its tokenizer does not allow it.

    To be called before the engine serves: no other thread runs for up to a second. Raises ValueError if the
    backend is not installed.
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


_NOT_COMPILED = "The constraint cannot be compiled."
_NO_COMPILER = "This engine's model cannot be given constraints: its tokenizer is of no kind that they know."


@dataclass(slots=True)
class _Entry:
    sequence: Sequence
    deadline: float
    compiler: ConstraintCompiler
    compiled: Future[CompiledConstraint]
    # Only for a sequence that is resumed after some tokens.
    resumed: Future[Restriction] | None = None


class WaitingConstraints:
    """Sequences whose constraints are being compiled, in the order of their arrival.

    `wake` is called from another thread when one of them may be ready.
    """

    def __init__(self, grammars: Grammars, wake: Callable[[], None]) -> None:
        self._grammars = grammars
        self._wake = wake
        self._entries: dict[int, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def tokens(self) -> int:
        """Tokens of the sequences."""
        return sum(len(entry.sequence.token_ids) for entry in self._entries.values())

    @property
    def patience(self) -> float | None:
        """Seconds until one of them has waited too long; None if none waits."""
        deadlines = [entry.deadline for entry in self._entries.values()]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def add(self, sequence: Sequence, options: ConstraintOptions) -> Restriction | None:
        """Return a sequence's restriction if its constraint is compiled, else let it wait.

        Raises QueueFull, and ConstraintRefused without a compiler.
        """
        compiler, limit = self._grammars.compiler, self._grammars.queue
        if compiler is None:
            raise ConstraintRefused(_NO_COMPILER)
        found = compiler.find(options)
        if found is not None and not sequence.num_generated_tokens:
            return Restriction(found, sequence.params.stop_ids)
        if len(self._entries) >= limit:
            raise QueueFull("grammar_queue", limit)
        compiler.check_room()
        if found is None:
            compiled = compiler.compile(options, self._wake)
        else:
            compiled = Future()
            compiled.set_result(found)
        deadline = time.monotonic() + self._grammars.timeout_s
        self._entries[sequence.key] = _Entry(sequence, deadline, compiler, compiled)
        return None

    def remove(self, key: int) -> Sequence | None:
        """Take out a sequence; None if it does not wait here."""
        entry = self._entries.pop(key, None)
        return None if entry is None else entry.sequence

    def take(self) -> Iterator[tuple[Sequence, Restriction | ConstraintRefused]]:
        """Take out the sequences that are ready or refused, with the restriction or the refusal."""
        if not self._entries:
            return
        now = time.monotonic()
        for key, entry in list(self._entries.items()):
            result = self._result(entry, now)
            if result is not None:
                del self._entries[key]
                yield entry.sequence, result

    def _result(self, entry: _Entry, now: float) -> Restriction | ConstraintRefused | None:
        try:
            found = self._ready(entry)
        except ConstraintRefused as refusal:
            return refusal
        except Exception as error:
            # Its text may show the constraint.
            log.error("a constraint cannot be compiled", error=type(error).__name__)
            return ConstraintRefused(_NOT_COMPILED)
        if found is None and now >= entry.deadline:
            seconds = f"{self._grammars.timeout_s:g} seconds"
            return ConstraintRefused(f"The constraint was not compiled in {seconds} (grammar_timeout_s).")
        return found

    def _ready(self, entry: _Entry) -> Restriction | None:
        if entry.resumed is not None:
            return entry.resumed.result() if entry.resumed.done() else None
        if not entry.compiled.done():
            return None
        compiled, stop_ids = entry.compiled.result(), entry.sequence.params.stop_ids
        count = entry.sequence.num_generated_tokens
        if not count:
            return Restriction(compiled, stop_ids)
        tokens = entry.sequence.token_ids[-count:]
        entry.resumed = entry.compiler.resume(compiled, stop_ids, tokens, self._wake)
        return None


_PARAM = "constraint"
_FAILED = "The constraint cannot be followed any further within the engine's limits."
_NOTHING_LEFT = (
    "The constraint, allowed_token_ids, bad_words and min_tokens leave no token that could follow."
)


class ConstrainedSequences:
    """Sequences that wait for their constraints, and the restrictions of those that run, by key.

    Sequences that end here are reported in the step's columns; `release` is called for each that ends before
    the scheduler has it. `wake`, from any thread, wakes the loop.
    """

    def __init__(
        self,
        grammars: Grammars,
        scheduler: Scheduler,
        columns: StepBuilder,
        tracer: StepTracer,
        *,
        release: Callable[[int], None],
        wake: Callable[[], None],
    ) -> None:
        self._compiler = grammars.compiler
        self._scheduler = scheduler
        self._columns = columns
        self._tracer = tracer
        self._release = release
        self._waiting = WaitingConstraints(grammars, wake)
        # Key of a waiting sequence -> key of the sequence that computes the same prompt, or 0.
        self._same_prompt_as: dict[int, int] = {}
        self.restrictions: dict[int, Restriction] = {}
        self._refused = 0
        self._masks = 0
        self._seconds = 0.0

    def __len__(self) -> int:
        """Number of sequences that wait for their constraints."""
        return len(self._waiting)

    @property
    def tokens(self) -> int:
        """Tokens of the sequences that wait."""
        return self._waiting.tokens

    @property
    def patience(self) -> float | None:
        """Seconds until one of them has waited too long; None if none waits."""
        return self._waiting.patience

    def load(self) -> ConstraintLoad:
        """Return the figures of constraints since the start."""
        compiler = self._compiler
        if compiler is None:
            return ConstraintLoad()
        return ConstraintLoad(
            compiled=compiler.compiled,
            reused=compiler.reused,
            refused=self._refused,
            masks=self._masks,
            compile_seconds=compiler.seconds,
            mask_seconds=self._seconds,
        )

    def add(self, sequence: Sequence, options: ConstraintOptions, same_prompt_as: int) -> bool:
        """Return True if the sequence may run now; else `admit` queues it.

        Raises SequenceRefused, QueueFull.
        """
        try:
            restriction = self._waiting.add(sequence, options)
        except ConstraintRefused as refusal:
            raise SequenceRefused(CoreErrorCode.INVALID_ARGUMENT, str(refusal), _PARAM) from None
        if restriction is None:
            self._same_prompt_as[sequence.key] = same_prompt_as
            return False
        self.restrictions[sequence.key] = restriction
        return True

    def admit(self) -> None:
        """Queue the sequences whose constraints were compiled since the last call."""
        for sequence, result in self._waiting.take():
            same_prompt_as = self._same_prompt_as.pop(sequence.key)
            if isinstance(result, ConstraintRefused):
                self._refused += 1
                self._refuse(sequence, CoreErrorCode.INVALID_ARGUMENT, str(result), _PARAM)
                continue
            self.restrictions[sequence.key] = result
            try:
                self._scheduler.add(sequence, same_prompt_as or None)
            except SequenceRefused as refused:
                self._refuse(sequence, refused.code, refused.message, refused.param)
            except QueueFull as full:
                self._refuse(sequence, CoreErrorCode.OVERLOADED, str(full))

    def _refuse(
        self, sequence: Sequence, code: CoreErrorCode, message: str, param: str | None = None
    ) -> None:
        self.forget(sequence.key)
        self._release(sequence.key)
        self._columns.add_failure(sequence, code, message, param)

    def abort(self, key: int) -> None:
        """End a sequence that waits, if there is one with this key."""
        sequence = self._waiting.remove(key)
        if sequence is not None:
            del self._same_prompt_as[key]
            self._release(key)
            sequence.finish()
            self._columns.add_outcome(Finished(sequence, None, FinishReason.ABORT), None)

    def forget(self, key: int) -> None:
        """Drop the restriction of a sequence that ended, if it has one."""
        self.restrictions.pop(key, None)

    def concern(self, plan: StepPlan) -> bool:
        """Return True if the plan samples for a constrained sequence."""
        return bool(self.restrictions) and any(sequence.constrained for sequence in plan.sampling())

    def restrict(self, step: LaunchedStep) -> None:
        """Launch the rest of a step whose forwards were launched, with masks that know all tokens so far."""
        if not step.awaits_masks:
            return
        with self._tracer.span("masks", step.number):
            masks, failed = self._mask(step.plan)
        for sequence in failed:
            self._fail(sequence, _FAILED)
        step.sample(masks)

    def _mask(self, plan: StepPlan) -> tuple[TokenMasks | None, list[Sequence]]:
        """Return the masks of a step, None if none of its constrained sequences lives; and failed ones."""
        if self._compiler is None:
            return None, []
        begun = time.perf_counter()
        rows: list[int] = []
        found: list[tuple[Sequence, Restriction]] = []
        for row, sequence in enumerate(plan.sampling()):
            restriction = self.restrictions.get(sequence.key)
            if restriction is not None and not sequence.finished:
                rows.append(row)
                found.append((sequence, restriction))
        if not rows:
            return None, []
        bits: Bits = np.empty((len(rows), self._compiler.vocabulary.words), dtype=np.int32)
        failed = _fill(self._compiler, found, bits)
        self._masks += 1
        self._seconds += time.perf_counter() - begun
        return TokenMasks(rows, bits), failed

    def follow(self, outcome: Outcome) -> Outcome | None:
        """Return the outcome of a constrained sequence's token; None if the sequence failed by it."""
        sequence, token_id = outcome.sequence, outcome.token_id
        taken, restriction = Taken.GOES_ON, self.restrictions.get(sequence.key)
        if token_id is not None and restriction is not None:
            taken = restriction.take(token_id)
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
        """End a sequence for which no token is left: its text may be complete. False if unconstrained."""
        if not sequence.constrained:
            return False
        restriction = self.restrictions.get(sequence.key)
        if restriction is None or not restriction.complete:
            self._fail(sequence, _NOTHING_LEFT)
            return True
        finished = self._scheduler.end(sequence.key, FinishReason.STOP)
        if finished is not None:
            self._columns.add_outcome(finished, None)
            self.forget(sequence.key)
        return True

    def _fail(self, sequence: Sequence, message: str) -> None:
        self.forget(sequence.key)
        if self._scheduler.end(sequence.key, FinishReason.ERROR) is not None:
            self._columns.add_failure(sequence, CoreErrorCode.INVALID_ARGUMENT, message, _PARAM)


def _fill(
    compiler: ConstraintCompiler, found: Items[tuple[Sequence, Restriction]], bits: Bits
) -> list[Sequence]:
    """Fill in a row of `bits` for each sequence. Return those whose matchers failed."""
    matchers: list[tuple[Matcher, int]] = [
        (restriction.matcher, index) for index, (_, restriction) in enumerate(found) if restriction.active
    ]
    if matchers:
        compiler.backend.fill(matchers, bits)
    failed: list[Sequence] = []
    for index, (sequence, restriction) in enumerate(found):
        if restriction.active and restriction.matcher.failed:
            failed.append(sequence)
            continue
        mask_stops = sequence.masks_stops(len(sequence.token_ids))
        restriction.narrow(bits[index], mask_stops=mask_stops)
    return failed
