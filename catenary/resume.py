"""Failover of a sequence: its failures, what it has emitted, whether and when it is submitted again.

Used by the gateway, and by the router for plain `Generate` calls.
"""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from typing import ClassVar, TypeAlias

from pydantic import BaseModel, Field

from catenary.backoff import Backoff
from catenary.seeds import draw_seed
from catenary.v1 import common_pb2

ROUTER_LOST = common_pb2.Error(
    code=common_pb2.ERROR_CODE_UNAVAILABLE,
    message="The connection to the router was lost. Please retry.",
    retryable=True,
)
ABORTED = common_pb2.Error(
    code=common_pb2.ERROR_CODE_UNAVAILABLE, message="The request was aborted by the server.", retryable=True
)
# What no other life could better.
GOOD_ENDS = (common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH)
NO_REASON = common_pb2.Error(
    code=common_pb2.ERROR_CODE_INTERNAL, message="The sequence failed without a reason."
)


class Cause(StrEnum):
    """Why a sequence is submitted again. A closed set: it labels metrics."""

    # Its engine died, was fenced, or stalled for too long.
    ENGINE_LOST = "engine_lost"
    # Its engine failed it, and perhaps a whole step with it.
    ENGINE_FAILED = "engine_failed"
    ROUTER_LOST = "router_lost"
    # What runs it is about to end, or takes nothing new.
    DRAINING = "draining"
    # Nobody serves the model at the moment.
    UNAVAILABLE = "unavailable"
    OVERLOADED = "overloaded"
    # Somebody other than its reader has aborted it.
    ABORTED = "aborted"


_CAUSES: dict[int, Cause] = {
    common_pb2.ERROR_CODE_ENGINE_LOST: Cause.ENGINE_LOST,
    common_pb2.ERROR_CODE_INTERNAL: Cause.ENGINE_FAILED,
    common_pb2.ERROR_CODE_DRAINING: Cause.DRAINING,
    common_pb2.ERROR_CODE_UNAVAILABLE: Cause.UNAVAILABLE,
    common_pb2.ERROR_CODE_OVERLOADED: Cause.OVERLOADED,
}


@dataclass(frozen=True, slots=True)
class Failure:
    """The end of a life. `cause` is None for what no repetition mends; `refused`: it was never accepted."""

    error: common_pb2.Error
    cause: Cause | None
    refused: bool = False
    usage: common_pb2.Usage | None = None

    @classmethod
    def of_end(cls, end: common_pb2.SequenceEnd) -> Failure:
        """An end with FINISH_REASON_ERROR, or with an ABORT that its reader did not ask for."""
        if end.reason == common_pb2.FINISH_REASON_ABORT:
            return cls(ABORTED, Cause.ABORTED, usage=end.usage)
        error = end.error if end.HasField("error") else NO_REASON
        return cls(error, _CAUSES.get(error.code) if error.retryable else None, usage=end.usage)

    @classmethod
    def of_refusal(cls, error: common_pb2.Error) -> Failure:
        """A refusal, of a submit that may be the first one or not."""
        cause = _CAUSES.get(error.code) if error.retryable else None
        if cause is Cause.ENGINE_FAILED:
            cause = None
        if error.code == common_pb2.ERROR_CODE_MODEL_NOT_FOUND:
            # A router that has just been started does not know yet what its engines serve.
            cause = Cause.UNAVAILABLE
        return cls(error, cause, refused=True)

    @classmethod
    def router_lost(cls) -> Failure:
        """The stream to the router broke, or the router is silent."""
        return cls(ROUTER_LOST, Cause.ROUTER_LOST)


@dataclass(frozen=True, slots=True)
class Again:
    """Submit `Resumable.spec()` after `delay_s` seconds; by the clock's time `until`, or not at all."""

    cause: Cause
    delay_s: float
    until: float


@dataclass(frozen=True, slots=True)
class Finished:
    """Nothing is missing: its last token was there, and only the word that it is the last one was lost."""

    end: common_pb2.SequenceEnd


@dataclass(frozen=True, slots=True)
class GivenUp:
    """It was tried for long enough, or harms engines."""

    cause: Cause
    error: common_pb2.Error


@dataclass(frozen=True, slots=True)
class Passed:
    """Its reader gets this error: trying again does not mend it."""

    error: common_pb2.Error


Verdict: TypeAlias = Again | Finished | GivenUp | Passed


@dataclass(frozen=True, slots=True)
class ResumePolicy:
    """Bounds of failover, for every sequence alike.

    max_attempts: lives in a row that may end without a token; max_lives: lives of a sequence in all;
    wait_s: seconds in which nobody may take it before it is given up, counted from the failure;
    first_delay_s, longest_delay_s: pauses before it is submitted again double between these, each shortened
    by up to half at random.
    """

    max_attempts: int = 8
    max_lives: int = 64
    wait_s: float = 15.0
    first_delay_s: float = 0.02
    longest_delay_s: float = 2.0


_DIGEST_BYTES = 16


class PoisonedRequests:
    """Fingerprints of requests during whose first forward an engine died that computed nothing else.

    At most `limit` of them, each for `ttl_s` seconds: who sends such a request again under another name gets
    no further engine. While there are none, nothing is computed.
    """

    def __init__(self, *, limit: int, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._ttl_s = ttl_s
        self._clock = clock
        # In the order in which they are forgotten.
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until)

    def __contains__(self, spec: common_pb2.SequenceSpec) -> bool:
        now = self._clock()
        while self._until and next(iter(self._until.values())) <= now:
            self._until.popitem(last=False)
        return bool(self._until) and fingerprint(spec) in self._until

    def add(self, spec: common_pb2.SequenceSpec) -> None:
        """An engine died while it computed this sequence alone."""
        name = fingerprint(spec)
        self._until[name] = self._clock() + self._ttl_s
        self._until.move_to_end(name)
        if len(self._until) > self._limit:
            self._until.popitem(last=False)


def fingerprint(spec: common_pb2.SequenceSpec) -> bytes:
    """A digest of what an engine computes for a sequence: its prompt and parameters.

    The seed, which is drawn anew for most requests, who asks, and what is reported are left out, and so is
    what was emitted before: another life of the sequence is the same request.
    """
    prompt_len = spec.prompt_len if spec.HasField("prompt_len") else len(spec.token_ids)
    sampling = common_pb2.SamplingParams()
    sampling.CopyFrom(spec.sampling)
    sampling.ClearField("seed")
    computed = common_pb2.SequenceSpec(
        model=spec.model,
        token_ids=spec.token_ids[:prompt_len],
        sampling=sampling,
        stopping=spec.stopping,
        constraint=spec.constraint if spec.HasField("constraint") else None,
        beam_search=spec.beam_search if spec.HasField("beam_search") else None,
        pooling=spec.pooling if spec.HasField("pooling") else None,
    )
    return blake2b(computed.SerializeToString(deterministic=True), digest_size=_DIGEST_BYTES).digest()


class ResumeOptions(BaseModel):
    """A part of the gateway's options, and of the router's, which resumes plain `Generate` calls alone."""

    headings: ClassVar[Mapping[str, str]] = {
        "failover_wait_s": "Failover",
    }

    failover_wait_s: float = Field(
        15.0,
        ge=0,
        le=3600,
        description="Seconds that a request (in a router: a plain Generate call) waits for an engine, a "
        "router or (in a gateway) a tokenizer in place of a lost one.",
    )
    failover_attempts: int = Field(
        8,
        ge=1,
        le=1000,
        description="Engines or routers in a row that a request may lose without a token before it fails.",
    )
    failover_lives: int = Field(
        64, ge=1, le=100_000, description="Engines or routers that a request may lose in all before it fails."
    )
    poison_ttl_s: float = Field(
        600,
        ge=0,
        le=86_400,
        description="Seconds for which a request that killed engines, the last one alone, is refused.",
    )
    max_poisoned: int = Field(
        1024, ge=1, le=1_000_000, description="Such requests that are remembered; older ones are forgotten."
    )

    def resume_policy(self) -> ResumePolicy:
        """How often and how long a sequence is tried again."""
        return ResumePolicy(self.failover_attempts, self.failover_lives, self.failover_wait_s)

    def poisoned_requests(self) -> PoisonedRequests:
        """A memory for requests that kill engines."""
        return PoisonedRequests(limit=self.max_poisoned, ttl_s=self.poison_ttl_s)


# Engines that may die in a sequence's first forward before it is computed alone.
DEATHS_BEFORE_ALONE = 2

POISONED = common_pb2.Error(
    code=common_pb2.ERROR_CODE_POISONED,
    message="Engines died while they computed this request alone; it is not run again.",
)


class Resumable:
    """A sequence through all of its lives. A life begins with `spec()` submitted, and ends with a failure.

    Whoever reads the sequence calls `record` with all that is passed on, so that nothing is lost or comes
    twice. A sequence that emits nothing before its end (a beam search, a document) starts anew.
    """

    __slots__ = (
        "_alone",
        "_attempts",
        "_backoff",
        "_deaths",
        "_emitted",
        "_eos",
        "_failed",
        "_first_usage",
        "_given",
        "_life_from",
        "_lives",
        "_policy",
        "_prompt",
        "_resumed",
        "_since",
        "_told",
        "_told_now",
    )

    def __init__(
        self,
        spec: common_pb2.SequenceSpec,
        policy: ResumePolicy,
        *,
        like: Resumable | None = None,
        eos_token_ids: Collection[int] = (),
    ) -> None:
        """`spec` is kept, and gets a seed if it has none.

        Args:
            spec: the sequence; tokens that it has beyond prompt_len were emitted to somebody else before.
            policy: how often and how long it is tried.
            like: one with the same prompt: the tokens are held once for both, and taken out of `spec`.
            eos_token_ids: the model's, if they are known.
        """
        if not spec.HasField("pooling") and not spec.sampling.HasField("seed"):
            spec.sampling.seed = draw_seed()
        self._given = self._prompt = spec
        if like is not None and len(like._prompt.token_ids) == len(spec.token_ids):
            self._prompt = like._prompt
            spec.ClearField("token_ids")
        self._policy = policy
        self._eos = eos_token_ids
        self._emitted = array("I")
        # How many tokens there were when this life began.
        self._life_from = 0
        self._lives = 0
        # Lives in a row without a token, those of them in which an engine died, and whether one failed it.
        self._attempts = 0
        self._deaths = 0
        self._failed = False
        self._alone = False
        self._resumed = False
        # Since when nobody runs it.
        self._since: float | None = None
        self._backoff: Backoff | None = None
        # Log probabilities of prompt tokens that were passed on, and those that this life has told.
        self._told = 0
        self._told_now = 0
        self._first_usage: common_pb2.Usage | None = None

    @property
    def request_id(self) -> str:
        """For logs."""
        return self._given.request_id

    @property
    def model(self) -> str:
        """Served model name."""
        return self._given.model

    @property
    def resumed(self) -> bool:
        """Whether it was admitted before (`Submit.resumed`)."""
        return self._resumed

    @property
    def alone(self) -> bool:
        """Whether the next life is to be alone on its engine (`Submit.alone`)."""
        return self._alone

    @property
    def emitted(self) -> int:
        """Tokens that were passed on."""
        return len(self._emitted)

    def record(self, token_ids: Sequence[int]) -> None:
        """These tokens were passed on."""
        self._emitted.extend(token_ids)

    def record_prompt(self, count: int) -> int:
        """This life has told `count` more log probabilities of prompt tokens. Returns how many of them, from
        the first on, were passed on in an earlier life: they are to be left out."""
        known = max(0, min(count, self._told - self._told_now))
        self._told_now += count
        self._told = max(self._told, self._told_now)
        return known

    def spec(self) -> common_pb2.SequenceSpec:
        """What to submit now: the given one before the first token, else a new one with all tokens."""
        if not self._emitted and not self._told and self._given is self._prompt:
            return self._given
        spec = common_pb2.SequenceSpec()
        spec.CopyFrom(self._given)
        if self._given is not self._prompt:
            spec.token_ids.MergeFrom(self._prompt.token_ids)
        spec.prompt_len = self._prompt_len
        spec.token_ids.extend(self._emitted)
        if spec.response.HasField("prompt_logprobs") and (self._emitted or self._prompt_told):
            spec.response.ClearField("prompt_logprobs")
        return spec

    def settle(self, usage: common_pb2.Usage) -> None:
        """Put the counters of its end right, in place: what was cached counts for the life that gave the
        first token, and as 0 if that one was lost before it told."""
        if (first := self._first_usage) is not None:
            usage.cached_tokens = first.cached_tokens
            usage.transferred_tokens = first.transferred_tokens

    def after(self, failure: Failure, now: float) -> Verdict:
        """What to do about a failure at the steady time `now`, in seconds."""
        if not failure.refused:
            self._end_life(failure)
        if (end := self._whole(failure)) is not None:
            return Finished(end)
        # A queue that is full is told of; what had a place already waits for another one. So does what a
        # router sends away that ends: it may have waited there.
        full = failure.refused and failure.cause is Cause.OVERLOADED and not self._resumed
        if not failure.refused or failure.cause is Cause.DRAINING:
            self._admitted()
        if failure.cause is None or full:
            return Passed(failure.error)
        if not failure.refused and (given_up := self._hopeless(failure, failure.cause)) is not None:
            return given_up
        if self._since is None or not failure.refused:
            self._since = now
        if self._backoff is None:
            self._backoff = Backoff(self._policy.first_delay_s, self._policy.longest_delay_s)
        until = self._since + self._policy.wait_s
        delay = self._backoff.next_delay()
        if failure.error.HasField("retry_after_ms") and failure.cause is not Cause.DRAINING:
            delay = max(delay, failure.error.retry_after_ms / 1000)
        if now + delay > until:
            return GivenUp(failure.cause, failure.error)
        return Again(failure.cause, delay, until)

    def _end_life(self, failure: Failure) -> None:
        self._lives += 1
        self._told_now = 0
        if len(self._emitted) > self._life_from:
            if self._life_from == 0:
                self._first_usage = failure.usage or common_pb2.Usage()
            self._life_from = len(self._emitted)
            self._attempts = self._deaths = 0
            self._alone = self._failed = False
            self._backoff = None
            return
        self._attempts += 1
        if failure.cause is Cause.ENGINE_LOST:
            self._deaths += 1

    def _admitted(self) -> None:
        """It had its place: no queue refuses it, and it waits for longer than its client may have wanted."""
        self._resumed = True
        self._given.ClearField("max_wait_ms")

    def _hopeless(self, failure: Failure, cause: Cause) -> GivenUp | None:
        """Whether the life that has ended was the last one."""
        if self._attempts:
            if cause is Cause.ENGINE_LOST and self._alone:
                return GivenUp(cause, POISONED)
            self._alone = self._alone or self._deaths >= DEATHS_BEFORE_ALONE
        if cause is Cause.ENGINE_FAILED:
            if self._failed:
                return GivenUp(cause, failure.error)
            self._failed = True
        if self._attempts >= self._policy.max_attempts or self._lives >= self._policy.max_lives:
            return GivenUp(cause, failure.error)
        return None

    @property
    def _prompt_len(self) -> int:
        given = self._given
        return given.prompt_len if given.HasField("prompt_len") else len(self._prompt.token_ids)

    @property
    def _prompt_told(self) -> bool:
        return 0 < self._told == self._prompt_len - 1

    def _whole(self, failure: Failure) -> common_pb2.SequenceEnd | None:
        """The end that it must have had, if its last token was passed on: to submit it again would be
        refused, since nothing is left to generate."""
        if not self._emitted:
            return None
        prompt_len, stopping = self._prompt_len, self._given.stopping
        count = len(self._prompt.token_ids) - prompt_len + len(self._emitted)
        usage = common_pb2.Usage(prompt_tokens=prompt_len, completion_tokens=count)
        last = self._emitted[-1]
        ends = last in stopping.stop_token_ids or (last in self._eos and not stopping.ignore_eos)
        if ends and count >= stopping.min_tokens:
            reason = common_pb2.FINISH_REASON_STOP
            return common_pb2.SequenceEnd(reason=reason, usage=usage, stop_token_id=last)
        if stopping.HasField("max_tokens"):
            full = count >= stopping.max_tokens
        else:
            full = failure.error.code == common_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED
        if full:
            return common_pb2.SequenceEnd(reason=common_pb2.FINISH_REASON_LENGTH, usage=usage)
        return None
