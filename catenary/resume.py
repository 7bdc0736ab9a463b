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
# Ends that another attempt could not improve.
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
    # Its engine or router is about to end, or takes nothing new.
    DRAINING = "draining"
    # No engine serves the model at the moment.
    UNAVAILABLE = "unavailable"
    OVERLOADED = "overloaded"
    # Aborted, and not by its reader.
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
    """The end of an attempt. cause: None if a retry does not mend the error. refused: before admission."""

    error: common_pb2.Error
    cause: Cause | None
    refused: bool = False
    usage: common_pb2.Usage | None = None

    @classmethod
    def of_end(cls, end: common_pb2.SequenceEnd) -> Failure:
        """Read an end with FINISH_REASON_ERROR, or with an ABORT that the reader did not ask for."""
        if end.reason == common_pb2.FINISH_REASON_ABORT:
            return cls(ABORTED, Cause.ABORTED, usage=end.usage)
        error = end.error if end.HasField("error") else NO_REASON
        return cls(error, _CAUSES.get(error.code) if error.retryable else None, usage=end.usage)

    @classmethod
    def of_refusal(cls, error: common_pb2.Error) -> Failure:
        """Read a refusal, of a first submit or of a retry."""
        cause = _CAUSES.get(error.code) if error.retryable else None
        if cause is Cause.ENGINE_FAILED:
            cause = None
        if error.code == common_pb2.ERROR_CODE_MODEL_NOT_FOUND:
            # A router that has just been started does not know yet what its engines serve.
            cause = Cause.UNAVAILABLE
        return cls(error, cause, refused=True)

    @classmethod
    def router_lost(cls) -> Failure:
        """Return the failure of a stream that broke, or of a router that is silent."""
        return cls(ROUTER_LOST, Cause.ROUTER_LOST)


@dataclass(frozen=True, slots=True)
class Retry:
    """Submit `Resumable.spec()` after `delay_s` seconds; by the clock's time `until`, or not at all."""

    cause: Cause
    delay_s: float
    until: float


@dataclass(frozen=True, slots=True)
class Finished:
    """The sequence is complete: its last token was passed on, and only the message of its end was lost."""

    end: common_pb2.SequenceEnd


@dataclass(frozen=True, slots=True)
class GivenUp:
    """No further attempt: there were enough, or the sequence kills engines."""

    cause: Cause
    error: common_pb2.Error


@dataclass(frozen=True, slots=True)
class NotRetried:
    """The reader gets this error: a retry does not mend it."""

    error: common_pb2.Error


Verdict: TypeAlias = Retry | Finished | GivenUp | NotRetried


@dataclass(frozen=True, slots=True)
class ResumePolicy:
    """Bounds of failover, for every sequence alike.

    fruitless_attempts: attempts in a row that may end without a token; total_attempts: attempts in all;
    wait_s: seconds after a failure in which an engine must take the sequence, else it is given up;
    first_delay_s, longest_delay_s: the pause before a retry doubles from one to the other, and is shortened
    by up to half at random.
    """

    fruitless_attempts: int = 8
    total_attempts: int = 64
    wait_s: float = 15.0
    first_delay_s: float = 0.02
    longest_delay_s: float = 2.0


_DIGEST_BYTES = 16


class PoisonedRequests:
    """Fingerprints of poisoned requests: an engine died in the first forward of one in quarantine.

    At most `limit` of them, each for `ttl_s` seconds. A client that sends such a request again, under another
    id, is refused. While there are none, no fingerprint is computed.
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
        """Remember a sequence that killed an engine in quarantine."""
        name = fingerprint(spec)
        self._until[name] = self._clock() + self._ttl_s
        self._until.move_to_end(name)
        if len(self._until) > self._limit:
            self._until.popitem(last=False)


def fingerprint(spec: common_pb2.SequenceSpec) -> bytes:
    """Return a digest of what an engine computes for a sequence: its prompt and parameters.

    Left out: the seed, which is drawn anew for most requests, the caller, what is reported, and the tokens
    that were emitted: each attempt of a sequence is the same request.
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
        """Return how often and how long a sequence is retried."""
        return ResumePolicy(self.failover_attempts, self.failover_lives, self.failover_wait_s)

    def poisoned_requests(self) -> PoisonedRequests:
        """Return an empty memory for requests that kill engines."""
        return PoisonedRequests(limit=self.max_poisoned, ttl_s=self.poison_ttl_s)


# Engines that may die in a sequence's first forward before it is quarantined.
DEATHS_BEFORE_QUARANTINE = 2

POISONED = common_pb2.Error(
    code=common_pb2.ERROR_CODE_POISONED,
    message="Engines died while they computed this request alone; it is not run again.",
)


class Resumable:
    """A sequence with all of its attempts. One begins with `spec()` submitted, and ends with a failure.

    The reader of the sequence calls `record` with all tokens that it passes on, so that none is lost or comes
    twice. A sequence that emits nothing before its end (a beam search, a document) starts from its beginning.
    """

    __slots__ = (
        "_attempt_from",
        "_backoff",
        "_deaths",
        "_emitted",
        "_eos",
        "_failed",
        "_first_usage",
        "_fruitless",
        "_policy",
        "_prompt",
        "_quarantined",
        "_reported",
        "_reported_now",
        "_resumed",
        "_since",
        "_spec",
        "_total",
    )

    def __init__(
        self,
        spec: common_pb2.SequenceSpec,
        policy: ResumePolicy,
        *,
        like: Resumable | None = None,
        eos_token_ids: Collection[int] = (),
    ) -> None:
        """Keep `spec`, and give it a seed if it has none.

        Args:
            spec: the sequence; its tokens beyond prompt_len were emitted before, by another process.
            policy: how often and how long the sequence is retried.
            like: a sequence with the same prompt: the tokens are held once for both, and removed from `spec`.
            eos_token_ids: the model's, if they are known.
        """
        if not spec.HasField("pooling") and not spec.sampling.HasField("seed"):
            spec.sampling.seed = draw_seed()
        self._spec = self._prompt = spec
        if like is not None and len(like._prompt.token_ids) == len(spec.token_ids):
            self._prompt = like._prompt
            spec.ClearField("token_ids")
        self._policy = policy
        self._eos = eos_token_ids
        self._emitted = array("I")
        # Emitted tokens at the begin of this attempt.
        self._attempt_from = 0
        self._total = 0
        # Attempts in a row without a token; engines that died in them; whether an engine failed one of them.
        self._fruitless = 0
        self._deaths = 0
        self._failed = False
        self._quarantined = False
        self._resumed = False
        # Since when no engine runs it.
        self._since: float | None = None
        self._backoff: Backoff | None = None
        # Log probabilities of prompt tokens that were passed on, and those that this attempt has reported.
        self._reported = 0
        self._reported_now = 0
        self._first_usage: common_pb2.Usage | None = None

    @property
    def request_id(self) -> str:
        """Id of the sequence, for logs."""
        return self._spec.request_id

    @property
    def model(self) -> str:
        """Served model name."""
        return self._spec.model

    @property
    def resumed(self) -> bool:
        """Whether it was admitted before (`Submit.resumed`)."""
        return self._resumed

    @property
    def quarantined(self) -> bool:
        """Whether the next attempt has an engine to itself (`Submit.alone`)."""
        return self._quarantined

    @property
    def emitted(self) -> int:
        """Number of tokens that were passed on."""
        return len(self._emitted)

    def record(self, token_ids: Sequence[int]) -> None:
        """Note tokens that were passed on to the reader."""
        self._emitted.extend(token_ids)

    def record_prompt(self, count: int) -> int:
        """Note `count` more log probabilities of prompt tokens. Return how many of them, from the first on,
        the reader leaves out: they were passed on in an earlier attempt."""
        known = max(0, min(count, self._reported - self._reported_now))
        self._reported_now += count
        self._reported = max(self._reported, self._reported_now)
        return known

    def spec(self) -> common_pb2.SequenceSpec:
        """Return the spec to submit: the original before the first token, else a copy with all tokens."""
        if not self._emitted and not self._reported and self._spec is self._prompt:
            return self._spec
        spec = common_pb2.SequenceSpec()
        spec.CopyFrom(self._spec)
        if self._spec is not self._prompt:
            spec.token_ids.MergeFrom(self._prompt.token_ids)
        spec.prompt_len = self._prompt_len
        spec.token_ids.extend(self._emitted)
        if spec.response.HasField("prompt_logprobs") and (self._emitted or self._prompt_reported):
            spec.response.ClearField("prompt_logprobs")
        return spec

    def settle(self, usage: common_pb2.Usage) -> None:
        """Correct the counters of the end, in place: cached tokens are those of the attempt that gave the
        first token, and 0 if that attempt was lost before it reported them."""
        if (first := self._first_usage) is not None:
            usage.cached_tokens = first.cached_tokens
            usage.transferred_tokens = first.transferred_tokens

    def after(self, failure: Failure, now: float) -> Verdict:
        """Decide about a failure at the steady time `now`, in seconds."""
        if not failure.refused:
            self._end_attempt(failure)
        if (end := self._whole(failure)) is not None:
            return Finished(end)
        # A full queue is reported to the reader; a sequence that was admitted before waits for another place.
        # So does one that a draining router refuses: it may have waited there.
        full = failure.refused and failure.cause is Cause.OVERLOADED and not self._resumed
        if not failure.refused or failure.cause is Cause.DRAINING:
            self._admitted()
        if failure.cause is None or full:
            return NotRetried(failure.error)
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
        return Retry(failure.cause, delay, until)

    def _end_attempt(self, failure: Failure) -> None:
        self._total += 1
        self._reported_now = 0
        if len(self._emitted) > self._attempt_from:
            if self._attempt_from == 0:
                self._first_usage = failure.usage or common_pb2.Usage()
            self._attempt_from = len(self._emitted)
            self._fruitless = self._deaths = 0
            self._quarantined = self._failed = False
            self._backoff = None
            return
        self._fruitless += 1
        if failure.cause is Cause.ENGINE_LOST:
            self._deaths += 1

    def _admitted(self) -> None:
        """Mark it as admitted: no queue refuses it any more, and its client's limit of the wait is over."""
        self._resumed = True
        self._spec.ClearField("max_wait_ms")

    def _hopeless(self, failure: Failure, cause: Cause) -> GivenUp | None:
        """Return the verdict if the attempt that has ended was the last one."""
        if self._fruitless:
            if cause is Cause.ENGINE_LOST and self._quarantined:
                return GivenUp(cause, POISONED)
            self._quarantined = self._quarantined or self._deaths >= DEATHS_BEFORE_QUARANTINE
        if cause is Cause.ENGINE_FAILED:
            if self._failed:
                return GivenUp(cause, failure.error)
            self._failed = True
        if self._fruitless >= self._policy.fruitless_attempts or self._total >= self._policy.total_attempts:
            return GivenUp(cause, failure.error)
        return None

    @property
    def _prompt_len(self) -> int:
        spec = self._spec
        return spec.prompt_len if spec.HasField("prompt_len") else len(self._prompt.token_ids)

    @property
    def _prompt_reported(self) -> bool:
        return 0 < self._reported == self._prompt_len - 1

    def _whole(self, failure: Failure) -> common_pb2.SequenceEnd | None:
        """Return the end that the sequence must have had, if its last token was passed on: a retry would be
        refused, since nothing is left to generate."""
        if not self._emitted:
            return None
        prompt_len, stopping = self._prompt_len, self._spec.stopping
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
