"""The core's loop: drain the link, plan, launch, wait for the step before, commit that one, report.

So the device computes one step while the next is planned and its inputs are prepared. The loop has one
thread; it waits for the device, and for the link if there is nothing to do.
"""

from __future__ import annotations

from catenary.telemetry import get_logger
from services.engine.core.beams import BeamSearches
from services.engine.core.columns import StepBuilder
from services.engine.core.constraints import ConstrainedSequences
from services.engine.core.errors import CoreFailure
from services.engine.core.intake import Intake
from services.engine.core.kv_news import KvNews
from services.engine.core.startup import Engine
from services.engine.core.warming import graph_load
from services.engine.domain import CoreErrorCode, FinishReason
from services.engine.link import (
    AbortSequences,
    BlockingLink,
    CancelProfile,
    CoreLoad,
    CoreStep,
    FollowKv,
    StartProfile,
    StopCore,
    SubmitSequence,
    ToCore,
)
from services.engine.runner import LaunchedStep, StepResult
from services.engine.sampling import RowStatus, SampledToken
from services.engine.scheduler import (
    BeamGroup,
    Scored,
    Sequence,
    StepPlan,
)

# A forward may fail for what is in it. One that goes on failing has lost its device.
_MAX_FAILED_STEPS = 3

# Of hypotheses that one message holds before another one is begun.
_MANY_NUMBERS = 1 << 18

_INTERNAL = "The engine failed on this sequence."
_NO_MEMORY = "The engine's device has no memory for a step of this size."
_NOT_FINITE = "The model's output for this sequence is not a number."
_NOTHING_LEFT = "allowed_token_ids, bad_words and min_tokens leave no token that could follow."

log = get_logger(__name__)


class CoreLoop:
    """Runs one engine until the servicer stops it or goes away."""

    def __init__(self, link: BlockingLink, engine: Engine) -> None:
        self._link = link
        self._device = engine.device
        self._scheduler = engine.scheduler
        self._runner = engine.runner
        self._graphs = engine.graphs
        self._background = engine.background
        self._tracer = engine.tracer
        self._profiler = engine.profiler
        self._recorder = engine.recorder
        self._overlaps = engine.async_stepping
        self._beams = BeamSearches(engine.scheduler, engine.ready.model.eos_token_ids)
        self._handover = engine.handover
        self._handover.attach(link.wake)
        self._step = StepBuilder()
        self._kv_news = KvNews(engine.scheduler.kv_events)
        self._constrained = ConstrainedSequences(
            engine.grammars.constraints(link.wake),
            engine.scheduler,
            self._step,
            engine.tracer,
            self._handover.forget,
        )
        self._intake = Intake(engine, self._step, self._beams, self._constrained)
        self._in_flight: LaunchedStep | None = None
        self._stopping = False
        self._steps = 0
        self._generated = 0
        self._failed_steps = 0

    def run(self) -> None:
        """Returns after StopCore. Raises LinkClosed at the link's end, CoreFailure, or a defect's error."""
        # What was handled before the first poll may ask for a stop, or wait to be reported.
        self._report()
        while not self._stopping:
            self.advance()
            self.send_profile()
            for message in self._link.poll(self._patience()):
                self.handle(message)

    @property
    def busy(self) -> bool:
        """True while a sequence lives or a step is in flight."""
        return self._steps_go_on or len(self._constrained) + len(self._handover) > 0

    @property
    def _steps_go_on(self) -> bool:
        return self._scheduler.has_work or self._in_flight is not None

    def _patience(self) -> float | None:
        """Seconds to wait for a message; None for ever."""
        if self._steps_go_on or self._warm_up():
            return 0.0
        # Who waits for a constraint is woken when it is compiled.
        limits = (self._profiler.remaining, self._constrained.patience, self._handover.patience)
        return min((limit for limit in limits if limit is not None), default=None)

    def handle(self, message: ToCore) -> None:
        """Takes one message. Whatever it ends is reported with the next step."""
        match message:
            case SubmitSequence():
                self._intake.submit(message)
            case AbortSequences(keys=keys):
                for key in keys:
                    self._intake.abort(key)
            case FollowKv():
                self._kv_news.follow()
            case StartProfile():
                self._profiler.start(message, self._runner.launches)
            case CancelProfile():
                self._profiler.cancel(message)
            case StopCore():
                self._stopping = True
            case _:
                raise CoreFailure(f"the servicer sent {type(message).__name__} to a running core")

    def advance(self) -> None:
        """Launches the next step if there is work, ends the one before it, and reports what there is."""
        freed = self._intake.admit()
        begun = self._begin()
        if self._overlaps:
            begun, self._in_flight = self._in_flight, begun
            if begun is not None:
                self._finish(begun)
            if self._in_flight is not None:
                self._constrained.restrict(self._in_flight)
        elif begun is not None:
            self._constrained.restrict(begun)
            self._finish(begun)
        if begun is not None or self._step or freed:
            self._report()
        # Behind the step's tokens, which somebody waits for.
        for news in self._kv_news.due():
            self._link.send(news)
        if not self.busy:
            self._scheduler.check()
            self._recorder.idle()
        elif self._background is not None:
            self._background.turn(busy=True)

    def send_profile(self) -> None:
        """Sends a profile that is over."""
        for message in self._profiler.due():
            self._link.send(message)

    def _warm_up(self) -> bool:
        """Goes on with a warm-up beside serving, for an idle engine; True if there was something to do."""
        if self._background is None or not self._background.turn(busy=False):
            return False
        self._report()
        return True

    def _report(self) -> None:
        load = self._load()
        self._tracer.counters("sequences", running=load.running, waiting=load.waiting)
        self._tracer.counters("KV blocks", used=load.used_blocks)
        self._link.send(CoreStep(columns=self._step.take(), load=load))

    def _begin(self) -> LaunchedStep | None:
        with self._tracer.span("plan", self._runner.launches + 1):
            plan = self._scheduler.plan()
        if plan is None:
            return None
        step = self._runner.launch(plan, masked=self._constrained.concern(plan))
        self._recorder.launched(step.number)
        return step

    def _finish(self, step: LaunchedStep) -> None:
        """Ends a step. One that failed ends its sequences; what the next computes for them is dropped."""
        self._steps += 1
        try:
            with self._tracer.span("wait", step.number):
                result = step.result()
        except Exception as error:
            self._failed_steps += 1
            self._recorder.ended(step.number, step.plan, whole=False)
            self._profiler.ended(step.number)
            # It may have failed before it moved blocks, whose new places then hold somebody else's KV.
            sequences = list(dict.fromkeys((*step.plan.sequences(), *step.plan.moved)))
            log.exception("a step failed", sequences=len(sequences))
            if self._device.out_of_memory(error):
                # The device goes on, and other shapes may well fit.
                self._failed_steps = 0
                self._fail(sequences, _NO_MEMORY, CoreErrorCode.OVERLOADED)
            elif self._failed_steps >= _MAX_FAILED_STEPS:
                raise CoreFailure(
                    f"{self._failed_steps} steps failed in a row: {type(error).__name__}"
                ) from error
            else:
                self._fail(sequences, _INTERNAL)
            self._scheduler.commit(step.plan, {})
            return
        self._failed_steps = 0
        # A warm-up beside serving takes time of the steps.
        self._recorder.ended(step.number, step.plan, whole=self._background is None)
        with self._tracer.span("commit", step.number):
            self._commit(step.plan, result)
        self._profiler.ended(step.number)

    def _commit(self, plan: StepPlan, result: StepResult) -> None:
        ids: dict[int, int] = {}
        scored: dict[int, SampledToken] = {}
        broken = list(result.broken)
        stuck: list[Sequence] = []
        for sequence, token in result.sampled:
            if sequence.group is not None and token.status is not RowStatus.NOT_FINITE:
                self._beams.note(sequence, sequence.group, token)
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
        stuck = [sequence for sequence in stuck if not self._constrained.end_stuck(sequence)]
        self._fail(stuck, _NOTHING_LEFT, CoreErrorCode.INVALID_ARGUMENT)
        self._report_prompts(result)
        outcomes = self._scheduler.commit(plan, ids)
        self._recorder.outcomes(outcomes)
        for outcome in outcomes:
            if isinstance(outcome, Scored):
                self._branch(outcome.group)
                continue
            if outcome.sequence.hands_over:
                self._step.add_offer(outcome.sequence, self._handover.offer(outcome.sequence))
                continue
            self._generated += 1
            if not outcome.sequence.constrained:
                self._step.add_outcome(outcome, scored.get(outcome.sequence.key))
            elif (followed := self._constrained.follow(outcome)) is not None:
                self._step.add_outcome(followed, scored.get(outcome.sequence.key))

    def _branch(self, group: BeamGroup) -> None:
        """Chooses the next tokens of a beam search, or ends it."""
        found = self._beams.advance(group)
        if found is None:
            self._generated += len(group.active)
        elif found:
            self._scheduler.end(group.lead.key, found[0].reason)
            self._beams.forget(group.lead.key)
            if self._step.numbers > _MANY_NUMBERS:
                # Together with others it could be too much for one message.
                self._report()
            self._step.add_hypotheses(group.lead, found)
        else:
            self._fail([group.lead], _NOTHING_LEFT, CoreErrorCode.INVALID_ARGUMENT)

    def _report_prompts(self, result: StepResult) -> None:
        """Passes on the scores of prompt tokens; those of a prompt that is computed again are known."""
        for scored in result.prompts:
            sequence = scored.sequence
            new = scored.scores[max(0, sequence.num_scored_tokens - scored.start) :]
            if new and not sequence.finished:
                sequence.num_scored_tokens += len(new)
                self._step.add_prompt_scores(sequence, new)

    def _fail(
        self, sequences: list[Sequence], message: str, code: CoreErrorCode = CoreErrorCode.INTERNAL
    ) -> None:
        """Ends sequences whose computation went wrong, and nothing else."""
        for sequence in sequences:
            ended = self._scheduler.end(sequence.key, FinishReason.ERROR)
            if ended is not None:
                self._beams.forget(ended.sequence.key)
                self._step.add_failure(ended.sequence, code, message)
                self._constrained.forget(ended.sequence.key)

    def _load(self) -> CoreLoad:
        load, counts = self._scheduler.load(), self._scheduler.counts
        return CoreLoad(
            running=load.running,
            waiting=load.waiting + len(self._constrained) + len(self._handover),
            used_blocks=load.used_blocks,
            pending_prefill_tokens=load.pending_prefill_tokens + self._constrained.tokens,
            steps=self._steps,
            generated_tokens=self._generated,
            prompt_tokens=counts.prompt_tokens,
            cached_prompt_tokens=counts.cached_prompt_tokens,
            preemptions=counts.preemptions,
            graphs=graph_load(self._graphs, self._background, self._device),
            constraints=self._constrained.load,
            transfers=self._handover.load(),
        )
