"""Work of a core that generates: take in sequences, plan, launch, wait for the step before, commit it.

The device computes one step while the next is planned and its inputs are prepared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from catenary.telemetry import get_logger
from services.engine.bucketing import Recorder
from services.engine.core.beams import BeamSearches, check_beams
from services.engine.core.constraints import NO_GRAMMARS, ConstrainedSequences, Grammars
from services.engine.core.errors import CoreFailure
from services.engine.core.handover import Handover, prompt_alone
from services.engine.core.loop import Profiler
from services.engine.core.outputs import KvEventDelta, StepBuilder
from services.engine.device import Device
from services.engine.domain import CoreErrorCode, FinishReason
from services.engine.graphs import BackgroundWarmUp, CodeCache, Graphs
from services.engine.link import CoreLoad, CoreReady, GraphLoad, PhaseLoad, StepColumns, SubmitSequence
from services.engine.model.paged import PagedModel
from services.engine.runner import LaunchedStep, Runner, StepResult
from services.engine.sampling import RowStatus, SampledToken
from services.engine.scheduler import (
    BeamGroup,
    Finished,
    Outcome,
    QueueFull,
    Scheduler,
    Scored,
    Sequence,
    SequenceRefused,
    StepPlan,
    sequence_from,
)
from services.engine.tracing import StepTracer

log = get_logger(__name__)


class ServingRecorder:
    """Record of steps and lengths for learning buckets, or nothing without a file.

    Steps overlap: one waits for the step before it. So a step's time counts from its launch, or from the end
    of the step before if that was later.
    """

    def __init__(self, path: Path | None) -> None:
        """Raise ValueError if the file cannot be written."""
        self._recorder = None if path is None else Recorder(path)
        self._launches: dict[int, float] = {}
        self._ended = 0.0

    def launched(self, number: int) -> None:
        """Note the launch of a step."""
        if self._recorder is not None:
            self._launches[number] = time.perf_counter()

    def ended(self, number: int, plan: StepPlan, *, whole: bool) -> None:
        """Note the end of a step. `whole`: all that was planned was computed, and nothing else meanwhile."""
        if self._recorder is None:
            return
        now = time.perf_counter()
        begun = max(self._launches.pop(number), self._ended)
        self._ended = now
        if whole:
            self._recorder.step(plan.bucket_prefill, plan.bucket_decode, now - begun)

    def outcomes(self, outcomes: Iterable[Outcome | Scored]) -> None:
        """Note the lengths of the sequences that ended with these outcomes of a step."""
        if self._recorder is None:
            return
        for outcome in outcomes:
            if isinstance(outcome, Finished):
                sequence = outcome.sequence
                self._recorder.sequence(sequence.prompt_len, sequence.num_generated_tokens)

    def idle(self) -> None:
        """Write the buffer to the file, while no step waits for it."""
        if self._recorder is not None:
            self._recorder.flush()


@dataclass(frozen=True, slots=True)
class GeneratingEngine:
    """A started core that generates."""

    model: PagedModel
    scheduler: Scheduler
    runner: Runner
    graphs: Graphs
    background: BackgroundWarmUp | None
    device: Device
    tracer: StepTracer
    profiler: Profiler
    recorder: ServingRecorder
    max_beam_width: int
    async_stepping: bool
    ready: CoreReady
    code: CodeCache | None
    handover: Handover
    grammars: Grammars = NO_GRAMMARS

    def work(self, wake: Callable[[], None], report: Callable[[], None]) -> GenerationWork:
        return GenerationWork(self, wake, report)

    def close(self) -> None:
        """Wait for the device, complete the trace and the recording, keep compiled code."""
        self.handover.close()
        self.device.stream.close()
        self.grammars.close()
        self.recorder.idle()
        self.tracer.close()
        if self.code is not None:
            self.code.seal()
            self.code.close()


# A forward may fail for what is in it. After so many in a row the device is taken for lost.
_MAX_FAILED_STEPS = 3

# Numbers of the hypotheses in one message, after which another is begun.
_MANY_NUMBERS = 1 << 18

_INTERNAL = "The engine failed on this sequence."
_NO_MEMORY = "The engine's device has no memory for a step of this size."
_NOT_FINITE = "The model's output for this sequence is not a number."
_NOTHING_LEFT = "allowed_token_ids, bad_words and min_tokens leave no token that could follow."


class GenerationWork:
    """Sequences of one engine. Implements `loop.Work`."""

    def __init__(
        self, engine: GeneratingEngine, wake: Callable[[], None], report: Callable[[], None]
    ) -> None:
        self._report = report
        self._device = engine.device
        self._scheduler = engine.scheduler
        self._runner = engine.runner
        self._graphs = engine.graphs
        self._background = engine.background
        self._tracer = engine.tracer
        self._profiler = engine.profiler
        self._recorder = engine.recorder
        self._overlaps = engine.async_stepping
        self._vocab_size = engine.ready.model.vocab_size
        self._eos_token_ids = engine.ready.model.eos_token_ids
        self._max_beam_width = engine.max_beam_width
        self.beams = BeamSearches(engine.scheduler, engine.ready.model.eos_token_ids)
        self._handover = engine.handover
        self._handover.attach(wake)
        self._columns = StepBuilder()
        self.constrained = ConstrainedSequences(
            engine.grammars,
            engine.scheduler,
            self._columns,
            engine.tracer,
            release=self._handover.forget,
            wake=wake,
        )
        self.kv_event_delta = KvEventDelta(engine.scheduler.kv_events)
        self.in_flight: LaunchedStep | None = None
        self._ended_steps = 0
        self._generated = 0
        self._failed_steps = 0

    @property
    def busy(self) -> bool:
        """See `loop.Work`. A step in flight counts."""
        return self.steppable or len(self.constrained) + len(self._handover) > 0

    @property
    def steppable(self) -> bool:
        return self._scheduler.has_work or self.in_flight is not None

    @property
    def patience(self) -> float | None:
        """See `loop.Work`. A constraint that is compiled wakes the loop."""
        limits = (self.constrained.patience, self._handover.patience)
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def steps(self) -> int:
        return self._runner.launches

    # Intake: checked, then to the scheduler at once, or when KV or a constraint that it waits for is there.

    def submit(self, message: SubmitSequence) -> None:
        """Take in a sequence: it runs, or waits for KV, or for its constraint."""
        sequence = sequence_from(message, self._eos_token_ids)
        try:
            check_token_ids(message, self._vocab_size)
        except SequenceRefused as refusal:
            self._refuse(sequence, refusal.code, refusal.message, refusal.param)
            return
        if not self._handover.begin(sequence, message):
            self._enter(sequence, message)

    def abort(self, key: int) -> None:
        """End a sequence wherever it is, and withdraw the offer of one that has ended."""
        finished = self._scheduler.end(key, FinishReason.ABORT)
        if finished is not None:
            self.beams.forget(key)
            self._columns.add_outcome(finished, None)
            self.constrained.forget(key)
        elif (waiting := self._handover.abort(key)) is not None:
            waiting.finish()
            self._columns.add_outcome(Finished(waiting, None, FinishReason.ABORT), None)
        else:
            self.constrained.abort(key)

    def _admit_waiting(self) -> bool:
        """Queue sequences whose KV or constraint has come. True if blocks came free meanwhile."""
        arrived, freed = self._handover.turn()
        for sequence, message in arrived:
            self._enter(sequence, message)
        self.constrained.admit()
        return freed

    def _enter(self, sequence: Sequence, message: SubmitSequence) -> None:
        """Queue a sequence, or let it wait for its constraint."""
        try:
            constraint, leader = message.constraint, message.same_prompt_as
            if message.prefill_only:
                self._scheduler.add(prompt_alone(message))
            elif message.beams is not None:
                check_beams(message.beams, message, self._max_beam_width)
                self.beams.submit(message, message.beams)
            elif constraint is None or self.constrained.add(sequence, constraint, leader):
                self._scheduler.add(sequence, leader or None)
        except SequenceRefused as refusal:
            self._refuse(sequence, refusal.code, refusal.message, refusal.param)
        except QueueFull as refusal:
            self._refuse(sequence, CoreErrorCode.OVERLOADED, str(refusal))

    def _refuse(
        self, sequence: Sequence, code: CoreErrorCode, message: str, param: str | None = None
    ) -> None:
        self._columns.add_failure(sequence, code, message, param)
        self.constrained.forget(sequence.key)
        self._handover.forget(sequence.key)

    # Steps.

    def step(self) -> bool:
        """See `loop.Work`. With overlap the step that ends is the one before the one that is launched."""
        freed = self._admit_waiting()
        begun = self._begin()
        if self._overlaps:
            begun, self.in_flight = self.in_flight, begun
            if begun is not None:
                self._finish(begun)
            if self.in_flight is not None:
                self.constrained.restrict(self.in_flight)
        elif begun is not None:
            self.constrained.restrict(begun)
            self._finish(begun)
        return begun is not None or bool(self._columns) or freed

    def settle(self) -> None:
        """Check the books of an idle engine; warm up a little during serving."""
        if not self.busy:
            self._scheduler.check()
            self._recorder.idle()
        elif self._background is not None:
            self._background.turn(busy=True)

    def warm_up(self) -> bool:
        return self._background is not None and self._background.turn(busy=False)

    def take(self) -> StepColumns:
        return self._columns.take()

    def load(self) -> CoreLoad:
        """See `loop.Work`. Sequences that wait for KV or a constraint count as waiting."""
        load, counts = self._scheduler.load(), self._scheduler.counts
        return CoreLoad(
            running=load.running,
            waiting=load.waiting + len(self.constrained) + len(self._handover),
            used_blocks=load.used_blocks,
            pending_prefill_tokens=load.pending_prefill_tokens + self.constrained.tokens,
            steps=self._ended_steps,
            generated_tokens=self._generated,
            prompt_tokens=counts.prompt_tokens,
            cached_prompt_tokens=counts.cached_prompt_tokens,
            preemptions=counts.preemptions,
            graphs=self._graph_load(),
            constraints=self.constrained.load(),
            transfers=self._handover.load(),
        )

    def _graph_load(self) -> GraphLoad:
        graphs, background = self._graphs, self._background
        prefill, decode = graphs.padding.prefill, graphs.padding.decode
        return GraphLoad(
            captured=graphs.captured_count,
            first_seen=graphs.first_seen,
            warm=background.done if background else 0,
            to_warm=background.total if background else 0,
            prefill=PhaseLoad(prefill.tokens, prefill.padding_tokens, prefill.blocks, prefill.padding_blocks),
            decode=PhaseLoad(decode.tokens, decode.padding_tokens, decode.blocks, decode.padding_blocks),
            device=self._device.execution.counters(),
        )

    def _begin(self) -> LaunchedStep | None:
        with self._tracer.span("plan", self._runner.launches + 1):
            plan = self._scheduler.plan()
        if plan is None:
            return None
        step = self._runner.launch(plan, masked=self.constrained.concern(plan))
        self._recorder.launched(step.number)
        return step

    def _finish(self, step: LaunchedStep) -> None:
        """End a step. If it failed, end its sequences; what the next computes for them is dropped."""
        self._ended_steps += 1
        try:
            with self._tracer.span("wait", step.number):
                result = step.result()
        except Exception as error:
            self._fail_step(step, error)
            return
        self._failed_steps = 0
        # A warm-up during serving takes time of the steps.
        self._recorder.ended(step.number, step.plan, whole=self._background is None)
        with self._tracer.span("commit", step.number):
            self._commit(step.plan, result)
        self._profiler.ended(step.number)

    def _fail_step(self, step: LaunchedStep, error: Exception) -> None:
        self._failed_steps += 1
        self._recorder.ended(step.number, step.plan, whole=False)
        self._profiler.ended(step.number)
        # It may have failed before it moved blocks, whose new places then hold KV of other sequences.
        sequences = list(dict.fromkeys((*step.plan.sequences(), *step.plan.moved)))
        log.error("a step failed", exc_info=error, sequences=len(sequences))
        if self._device.memory.out_of_memory(error):
            # The device works on, and other shapes may well fit.
            self._failed_steps = 0
            self._fail(sequences, _NO_MEMORY, CoreErrorCode.OVERLOADED)
        elif self._failed_steps >= _MAX_FAILED_STEPS:
            text = f"{self._failed_steps} steps failed in a row: {type(error).__name__}"
            raise CoreFailure(text) from error
        else:
            self._fail(sequences, _INTERNAL)
        self._scheduler.commit(step.plan, {})

    def _commit(self, plan: StepPlan, result: StepResult) -> None:
        ids: dict[int, int] = {}
        scored: dict[int, SampledToken] = {}
        broken = list(result.broken)
        stuck: list[Sequence] = []
        for sequence, token in result.sampled:
            if sequence.group is not None and token.status is not RowStatus.NOT_FINITE:
                self.beams.note(sequence, sequence.group, token)
            elif token.token_id is not None:
                ids[sequence.key] = token.token_id
                if token.logprob is not None:
                    scored[sequence.key] = token
            elif token.status is RowStatus.NOTHING_LEFT:
                stuck.append(sequence)
            else:
                broken.append(sequence)
        broken += [scores.sequence for scores in result.prompts if not scores.finite]
        # Before the commit, which offers full blocks to others.
        self._fail(broken, _NOT_FINITE)
        stuck = [sequence for sequence in stuck if not self.constrained.end_stuck(sequence)]
        self._fail(stuck, _NOTHING_LEFT, CoreErrorCode.INVALID_ARGUMENT)
        self._add_prompt_scores(result)
        outcomes = self._scheduler.commit(plan, ids)
        self._recorder.outcomes(outcomes)
        for outcome in outcomes:
            if isinstance(outcome, Scored):
                self._branch(outcome.group)
                continue
            if outcome.sequence.hands_over:
                self._columns.add_offer(outcome.sequence, self._handover.offer(outcome.sequence))
                continue
            self._generated += 1
            if not outcome.sequence.constrained:
                self._columns.add_outcome(outcome, scored.get(outcome.sequence.key))
            elif (followed := self.constrained.follow(outcome)) is not None:
                self._columns.add_outcome(followed, scored.get(outcome.sequence.key))

    def _branch(self, group: BeamGroup) -> None:
        """Choose the next tokens of a beam search, or end it."""
        found = self.beams.advance(group)
        if found is None:
            self._generated += len(group.active)
        elif found:
            self._scheduler.end(group.lead.key, found[0].reason)
            self.beams.forget(group.lead.key)
            if self._columns.numbers > _MANY_NUMBERS:
                # Together with others it could be too much for one message.
                self._report()
            self._columns.add_hypotheses(group.lead, found)
        else:
            self._fail([group.lead], _NOTHING_LEFT, CoreErrorCode.INVALID_ARGUMENT)

    def _add_prompt_scores(self, result: StepResult) -> None:
        """Report scores of prompt tokens, once each: a preempted prompt is computed again."""
        for scored in result.prompts:
            sequence = scored.sequence
            new = scored.scores[max(0, sequence.num_scored_tokens - scored.start) :]
            if new and not sequence.finished:
                sequence.num_scored_tokens += len(new)
                self._columns.add_prompt_scores(sequence, new)

    def _fail(
        self, sequences: list[Sequence], message: str, code: CoreErrorCode = CoreErrorCode.INTERNAL
    ) -> None:
        """End sequences whose computation failed, and nothing else."""
        for sequence in sequences:
            ended = self._scheduler.end(sequence.key, FinishReason.ERROR)
            if ended is not None:
                self.beams.forget(ended.sequence.key)
                self._columns.add_failure(ended.sequence, code, message)
                self.constrained.forget(ended.sequence.key)


def check_token_ids(message: SubmitSequence, vocab_size: int) -> None:
    """Raise SequenceRefused for an id that indexes no logit: a negative one would mean another's."""
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
