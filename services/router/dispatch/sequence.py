"""The objects of dispatch: a live sequence, its sink, its handover, and the outbox of its engine.

A sequence knows the link of its engine, and a link the sequences that its engine has. Each decision about a
sequence has a span.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol

from catenary.columns import StepRow
from catenary.outbox import Messages, Outbox
from catenary.telemetry import get_logger, record_span, tracing
from catenary.v1 import common_pb2, engine_pb2
from services.router.admission import LoadGuard, QueuedSequence
from services.router.dispatch.states import (
    ON_ENGINE,
    TRANSITIONS,
    Action,
    IllegalEvent,
    SequenceEvent,
    SequenceState,
)
from services.router.fleet import Engine
from services.router.placement import PlacementRequest, Receipt

_log = get_logger(__name__)

# Of the spans.
NAME = "route"
_FLOAT_BYTES = 4


def trace_placed(spec: common_pb2.SequenceSpec, receipt: Receipt) -> str:
    """Record a placement, from when the sequence began to wait. Returns the traceparent for the engine."""
    if not tracing():
        return spec.traceparent
    lasted_s = receipt.queued_ms / 1e3 + receipt.decision_us / 1e6
    return record_span(NAME, spec.traceparent, receipt.attributes(), lasted_s=lasted_s) or ""


def trace_refused(spec: common_pb2.SequenceSpec, error: common_pb2.Error, waited_s: float) -> None:
    """Record a refusal, after a wait of `waited_s`."""
    if tracing():
        attributes = {"catenary.sequence_id": spec.request_id, "gen_ai.request.model": spec.model}
        code = common_pb2.ErrorCode.Name(error.code)
        record_span(NAME, spec.traceparent, attributes, lasted_s=waited_s, error=code)


class AbortCause(StrEnum):
    """Why a sequence was aborted. A closed set: it labels a metric."""

    CLIENT = "client"
    DISCONNECT = "disconnect"
    SESSION_END = "session_end"
    SLOW_READER = "slow_reader"
    DRAIN = "drain"
    STALLED = "stalled"


class Sink(Protocol):
    """Receives what becomes of the sequences that were submitted with it.

    Per handle: any number of `row`, then exactly one `end` or `refuse`. None of them blocks.
    """

    def row(self, handle: int) -> StepRow:
        """Return the unread output of `handle`, to append to, and wake the reader."""

    def end(self, handle: int, end: common_pb2.SequenceEnd) -> None:
        """End the sequence, after the output that its row holds."""

    def refuse(self, handle: int, error: common_pb2.Error) -> None:
        """End the sequence without output: it was refused."""

    def abort_result(self, handle: int, outcome: common_pb2.AbortOutcome.ValueType) -> None:
        """Answer an abort that was asked for with `answer`."""


class NullSink:
    """The sink of a sequence whose client is gone."""

    def row(self, handle: int) -> StepRow:
        """See Sink. The row is thrown away."""
        return StepRow(handle)

    def end(self, handle: int, end: common_pb2.SequenceEnd) -> None:
        """See Sink."""

    def refuse(self, handle: int, error: common_pb2.Error) -> None:
        """See Sink."""

    def abort_result(self, handle: int, outcome: common_pb2.AbortOutcome.ValueType) -> None:
        """See Sink."""


NULL_SINK = NullSink()


@dataclass(slots=True, eq=False, repr=False)
class LiveSequence:
    """A sequence from its admission to its end. `apply` alone changes its state and its load.

    `handle`: names it to `sink`. `request`: the same for each placement. `same_prompt_as`: one that was
    submitted before with the same prompt. `resumed`: it was admitted before, here or by another router.
    """

    handle: int
    spec: common_pb2.SequenceSpec
    sink: Sink
    guard: LoadGuard
    request: PlacementRequest
    same_prompt_as: LiveSequence | None = None
    resumed: bool = field(default=False, kw_only=True)
    state: SequenceState = field(default=SequenceState.ADMITTED, init=False)
    # Its place in the admission queue; set before the first attempt to place it.
    entry: QueuedSequence[LiveSequence] | None = field(default=None, init=False)

    # Set with each placement; not there before the first one.
    link: EngineLink = field(init=False)
    engine_handle: int = field(init=False)
    # Tokens that the engine may emit.
    budget: int = field(init=False)
    # Size of the vector that it has to end with; 0 for a sequence that generates.
    vector_bytes: int = field(init=False)
    # Of the span of the placement, for the engine.
    traceparent: str = field(init=False)
    # Set if the sequence is split.
    handover: Handover | None = field(default=None, init=False)
    refused_by: list[Engine] = field(default_factory=list, init=False)

    # Alternatives asked for with each token's log probability; None if no log probabilities were.
    alternatives: int | None = field(init=False)
    # The same of the prompt's tokens, and how many of these were reported.
    prompt_alternatives: int | None = field(init=False)
    prompt_scored: int = field(default=0, init=False)
    # Hypotheses asked for; 0 without a beam search.
    results: int = field(init=False)
    emitted: int = field(default=0, init=False)
    aborted_at: float = field(default=0.0, init=False)
    abort_wanted_answer: bool = field(default=False, init=False)
    # Finish reason for metrics when it differs from the one sent to the engine.
    ends_as: str | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        spec, response = self.spec, self.spec.response
        self.traceparent = spec.traceparent
        self.alternatives = response.top_logprobs if response.HasField("top_logprobs") else None
        self.prompt_alternatives = response.prompt_logprobs if response.HasField("prompt_logprobs") else None
        self.results = spec.beam_search.results if spec.HasField("beam_search") else 0

    @property
    def quarantined(self) -> bool:
        """Whether its engine has nothing else until its first token."""
        return self.request.quarantined

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt, without those emitted in earlier attempts."""
        return self.spec.prompt_len if self.spec.HasField("prompt_len") else len(self.spec.token_ids)

    @property
    def engine(self) -> Engine | None:
        """The engine that has it now."""
        return self.link.engine if self.state in ON_ENGINE else None

    def apply(self, event: SequenceEvent, target: Target | None = None) -> None:
        """Change the state, and the load with it, by the table of transitions. `target`: of a placement.

        Raises:
            IllegalEvent: the state does not allow the event. It is logged, and nothing changes.
        """
        before = self.state
        transition = TRANSITIONS.get((before, event))
        if transition is None or (transition.action is Action.LOAD) != (target is not None):
            _log.error("illegal event", sequence=self.spec.request_id, state=before, illegal=event)
            raise IllegalEvent(before, event)
        self.state, action = transition
        if before in ON_ENGINE and action in _LEAVING:
            self.link.sequences.pop(self.engine_handle, None)
        if target is not None:
            self._load(target)
        elif action is Action.PREFILLED:
            self.guard.prefilled()
        elif action is Action.UNLOAD:
            self.guard.unplace()
        elif action is Action.RELEASE:
            self.guard.release()
            # Lest a chain of them grows.
            self.same_prompt_as = None

    def _load(self, target: Target) -> None:
        self.link, self.engine_handle = link, handle = target.link, target.handle
        link.sequences[handle] = self
        self.guard.place(link.engine, self.request.uncached_tokens, kv_tokens=target.kv_tokens)
        self.vector_bytes = 0
        if self.spec.HasField("pooling"):
            self.budget = 0
            self.vector_bytes = _FLOAT_BYTES * _width(self.spec.pooling, link.engine.model)
            return
        self.budget = link.engine.model.max_model_len - len(self.spec.token_ids)
        if self.spec.stopping.HasField("max_tokens"):
            replayed = len(self.spec.token_ids) - self.prompt_len
            self.budget = min(self.budget, self.spec.stopping.max_tokens - replayed)

    def ends_at(self, token_id: int) -> bool:
        """Whether the sequence may end with this token: a stop token of its own or of the model.

        A constrained sequence ends by the model's where nothing else may follow, even if it ignores them.
        """
        stopping = self.spec.stopping
        heeds = not stopping.ignore_eos or self.spec.HasField("constraint")
        ends = self.link.engine.model.eos_token_ids
        return token_id in stopping.stop_token_ids or (heeds and token_id in ends)

    def leader_handle(self) -> int | None:
        """Return the handle of the sequence with the same prompt, if the same engine has it."""
        leader = self.same_prompt_as
        if leader is None or leader.engine is None or leader.link is not self.link:
            return None
        return leader.engine_handle

    def usage(self) -> common_pb2.Usage:
        """Return the counters as far as the router knows them."""
        replayed = len(self.spec.token_ids) - self.prompt_len
        return common_pb2.Usage(prompt_tokens=self.prompt_len, completion_tokens=replayed + self.emitted)

    def ending(
        self, reason: common_pb2.FinishReason.ValueType, error: common_pb2.Error | None = None
    ) -> common_pb2.SequenceEnd:
        """Return an end that the router makes itself."""
        return common_pb2.SequenceEnd(reason=reason, usage=self.usage(), error=error)


_LEAVING = frozenset({Action.LOAD, Action.UNLOAD, Action.RELEASE})


class Target(NamedTuple):
    """The engine that a sequence is placed on, its handle there, and the tokens of KV that it needs there."""

    link: EngineLink
    handle: int
    kv_tokens: int


def _width(pooling: common_pb2.Pooling, model: common_pb2.ModelInfo) -> int:
    """Return the number of floats in the answer to a pooled sequence."""
    if pooling.task == common_pb2.MODEL_TASK_EMBED:
        return pooling.dimensions or model.embedding_width
    return len(model.labels) if pooling.task == common_pb2.MODEL_TASK_CLASSIFY else 1


@dataclass(slots=True, eq=False)
class Handover:
    """The handover of a split sequence. `followers` have the same prompt and wait until it is computed."""

    followers: list[LiveSequence] = field(default_factory=list)
    offer: common_pb2.KvOffer | None = None
    # Where the offer can be withdrawn.
    offered_by: EngineLink | None = None
    offer_handle: int = 0
    # Prompt tokens that the prefill engine had cached.
    cached_tokens: int = 0


# Key of a message that a later one of its kind replaces.
_LATEST = "latest"


class EngineLink(Outbox[engine_pb2.AttachResponse]):
    """Outbox of one attachment, and the sequences that its engine has. Nothing here blocks.

    It is bounded without a limit: an unsent submit is taken back by its abort, one abort at most follows a
    sent submit, renewals merge, and submits are bounded by admission.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.sequences: dict[int, LiveSequence] = {}
        self.error: common_pb2.Error | None = None
        self._ended = asyncio.Event()
        self._renewals: Messages[engine_pb2.AttachResponse] = Messages()
        self._aborts: Messages[engine_pb2.AttachResponse] = Messages()
        self._reserve: Messages[engine_pb2.AttachResponse] = Messages()
        self._submits: Messages[engine_pb2.AttachResponse] = Messages()
        self._release: Messages[engine_pb2.AttachResponse] = Messages()
        self._reserve_again: Messages[engine_pb2.AttachResponse] = Messages()
        self._drain: Messages[engine_pb2.AttachResponse] = Messages()
        super().__init__(
            self._renewals,
            self._aborts,
            # A reservation goes before the submit that it is for, its release after it.
            self._reserve,
            self._submits,
            self._release,
            self._reserve_again,
            # After the submits, which the engine still takes.
            self._drain,
        )

    def submit(self, message: engine_pb2.AttachResponse) -> None:
        """Queue a message with a submit."""
        if self._reserve_again.take_back(_LATEST):
            # It may be the one that the engine is reserved for, and must not come before the reservation. An
            # engine that was not told of the release stays reserved.
            self._release.take_back(_LATEST)
            self.put(self._reserve, _keep(wanted=True), _LATEST)
        self.put(self._submits, message, message.submit.handle)

    def abort(self, engine_handle: int) -> bool:
        """Queue an abort. True if the submit was still here: it is taken back, and nothing is sent."""
        if self._submits.take_back(engine_handle):
            return True
        message = engine_pb2.AttachResponse(abort=engine_pb2.AbortSequence(handle=engine_handle))
        self.put(self._aborts, message, engine_handle)
        return False

    def renew(self, report_sequence: int) -> None:
        """Queue the answer to a report; a later one replaces it."""
        renewed = engine_pb2.LeaseRenewed(sequence=report_sequence)
        self.put(self._renewals, engine_pb2.AttachResponse(renewed=renewed), _LATEST)

    def keep(self, *, wanted: bool) -> None:
        """Queue that the engine is reserved, before the submits that wait, or released, after them.

        A release and the next reservation are both told, else a router with much to do would never pass its
        turn on to other routers.
        """
        if not wanted:
            self._reserve_again.take_back(_LATEST)
            self.put(self._release, _keep(wanted=False), _LATEST)
        elif len(self._release):
            self.put(self._reserve_again, _keep(wanted=True), _LATEST)
        else:
            self.put(self._reserve, _keep(wanted=True), _LATEST)

    def drain(self, order: engine_pb2.DrainEngine) -> None:
        """Queue an order to drain; a later one replaces one that waits."""
        self.put(self._drain, engine_pb2.AttachResponse(drain=order), _LATEST)

    def end(self, error: common_pb2.Error | None = None) -> None:
        """End the stream; with `error`, as a refusal. The first call decides."""
        if self.closed:
            return
        self.error = error
        self.close()
        self._ended.set()

    async def ended(self) -> None:
        """Wait until the link is closed."""
        await self._ended.wait()

    async def messages(self) -> AsyncIterator[engine_pb2.AttachResponse]:
        """Yield the messages to write, in order, until the link is closed."""
        while (message := await self.next()) is not None:
            yield message


def _keep(*, wanted: bool) -> engine_pb2.AttachResponse:
    return engine_pb2.AttachResponse(keep=engine_pb2.KeepEngine(wanted=wanted))
