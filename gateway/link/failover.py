"""All routers as one session: sequences are spread over them, and resumed if a router or engine is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import count
from operator import attrgetter
from typing import Protocol, TypeVar

from catenary.resume import (
    GOOD_ENDS,
    POISONED,
    Cause,
    Failure,
    Finished,
    GivenUp,
    PoisonedRequests,
    Resumable,
    ResumePolicy,
    Retry,
)
from catenary.rpc import resolve
from catenary.telemetry import get_logger
from catenary.v1 import common_pb2
from gateway.errors import ApiError, from_wire, overloaded, timed_out, unavailable
from gateway.link.inbox import SequenceEnded, SequenceFeed, ended
from gateway.link.router_session import RouterSession
from gateway.streaming.delta import TokenLogprob
from gateway.targets import Dial, LookUp, Targets
from gateway.text.models import ModelRegistry

_log = get_logger(__name__)


class Place(Protocol):
    """Router that takes sequences."""

    @property
    def address(self) -> str:
        """Address, the same in every gateway."""

    @property
    def live(self) -> int:
        """Number of this gateway's sequences on the router."""


P = TypeVar("P", bound=Place)


def rendezvous(tenant: str, places: Sequence[P]) -> P:
    """Choose the router that has all sequences of a tenant, in every gateway: the one with the highest digest
    of tenant and address (rendezvous hashing).

    A router is fair among the tenants whose requests it sees. If it leaves, its tenants are spread over the
    other routers, and no other tenant moves."""
    return max(places, key=lambda place: _digest(tenant, place.address))


def least_busy(places: Sequence[P], turn: int) -> P:
    """Choose the router that has the fewest sequences of this gateway, for a request without a tenant.

    `turn`: a number that rises, by which equals take turns."""
    first = turn % len(places)
    return min((*places[first:], *places[:first]), key=lambda place: place.live)


def _digest(tenant: str, address: str) -> bytes:
    return blake2b(f"{tenant}\0{address}".encode(), digest_size=8).digest()


class PromptGroup:
    """Sequences with one prompt. `leader`: the one that computes it for the others, on the router that it was
    submitted to last; None before the first one."""

    __slots__ = ("leader",)

    def __init__(self) -> None:
        self.leader: FailoverSequence | None = None


class FailoverSequence:
    """Sequence through all of its attempts: the router that has it, and its reader.

    It receives the output of one attempt after another; the session changes its fields."""

    __slots__ = (
        "_owner",
        "feed",
        "group",
        "handle",
        "placed_whole",
        "refused_by",
        "resumable",
        "session",
        "stream_handle",
        "tenant",
        "timer",
        "tried",
    )

    def __init__(
        self,
        handle: int,
        feed: SequenceFeed,
        resumable: Resumable,
        group: PromptGroup,
        tenant: str,
        owner: FailoverSession,
    ) -> None:
        """Make an unplaced sequence. `tenant`: its sequences stay on one router."""
        self.handle = handle
        self.feed = feed
        self.resumable = resumable
        self.group = group
        self.tenant = tenant
        self._owner = owner
        self.session: RouterSession | None = None
        self.stream_handle = 0
        # Whether this attempt began with the prompt alone, so that others of the group can share it.
        self.placed_whole = False
        self.tried = False
        self.refused_by: RouterSession | None = None
        self.timer: asyncio.TimerHandle | None = None

    def extend(
        self, ids: list[int], logprobs: list[TokenLogprob], prompt: Sequence[TokenLogprob] = ()
    ) -> bool:
        if prompt:
            prompt = prompt[self.resumable.record_prompt(len(prompt)) :]
        if not self.feed.extend(ids, logprobs, prompt):
            return False
        self.resumable.record(ids)
        return True

    def ended(self, end: common_pb2.SequenceEnd) -> None:
        self.session = None
        self._owner.ended(self, end)

    def refused(self, error: common_pb2.Error) -> None:
        self.refused_by, self.session = self.session, None
        self._owner.failed(self, Failure.of_refusal(error))

    def lost(self) -> None:
        self.session = None
        self._owner.failed(self, Failure.router_lost())

    def unread(self) -> None:
        self.session = None
        self._owner.unread(self)

    def leave(self) -> None:
        """Leave its router, its group and its timer: no more output is wanted."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        if self.session is not None:
            self.session.abort(self.stream_handle)
            self.session = None
        if self.group.leader is self:
            self.group.leader = None


_UNREACHABLE = "The router is not reachable."


class FailoverSession:
    """A `Session` over one stream per router, and the `Listener` of these streams.

    A sequence whose engine or router is lost is submitted again with all tokens that it has emitted; its
    reader sees a pause. One that no router can take waits for `wait_s` of the policy.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        dial: Dial,
        *,
        instance_id: str,
        policy: ResumePolicy,
        models: ModelRegistry,
        on_resumed: Callable[[Cause], None],
        on_given_up: Callable[[Cause], None],
        poisoned: PoisonedRequests,
        connect_timeout_s: float,
        silence_s: float,
        max_outbound: int,
        look_up: LookUp = resolve,
    ) -> None:
        """Prepare the session; nothing is dialled before `run`. Raise ValueError for an invalid address.

        Args:
            addresses: of routers; a name may stand for several.
            dial: makes a channel to (address, name).
            instance_id: of this gateway.
            policy: bounds of failover.
            models: receives the models of the routers.
            on_resumed: called for each attempt that failed and is followed by another.
            on_given_up: called for each sequence that failed, though another attempt might have succeeded.
            poisoned: requests that are refused at once, whichever router they would go to.
            connect_timeout_s: for a router to answer a new session.
            silence_s: without a message, after which a router is lost.
            max_outbound: sequences that may wait to be sent; more are refused.
            look_up: returns the addresses of a name.
        """

        def open_session(address: str, name: str) -> RouterSession:
            return RouterSession(
                address,
                dial(address, name),
                instance_id=instance_id,
                listener=self,
                connect_timeout_s=connect_timeout_s,
                silence_s=silence_s,
            )

        self.targets: Targets[RouterSession] = Targets(
            addresses, open_session, attrgetter("connected"), look_up
        )
        self.run, self.close = self.targets.run, self.targets.close
        self._policy = policy
        self._models = models
        self._on_resumed = on_resumed
        self._on_given_up = on_given_up
        self._poisoned = poisoned
        self._max_outbound = max_outbound
        self._handles = count(1)
        self._sequences: dict[int, FailoverSequence] = {}
        # Sequences that no router can take now, in the order in which they began to wait.
        self._waiting: dict[int, FailoverSequence] = {}

    @property
    def connected(self) -> int:
        return sum(session.connected for session in self.targets.all)

    @property
    def live(self) -> int:
        """Sequences that were submitted and have not ended."""
        return len(self._sequences)

    def check(self, model: str, priority_class: common_pb2.PriorityClass.ValueType, tenant: str) -> None:
        able = self._able(model)
        asked = [rendezvous(tenant, able)] if tenant and able else able
        refusals = [session.shed.refusal(model, priority_class, tenant) for session in asked]
        errors = [error for error in refusals if error is not None]
        if errors and len(errors) == len(refusals):
            raise from_wire(min(errors, key=lambda error: error.retry_after_ms))

    def submit(
        self, spec: common_pb2.SequenceSpec, feed: SequenceFeed, same_prompt_as: int | None = None
    ) -> int:
        """See Session. Raise ApiError: no router is connected or was a moment ago (503), too many sequences
        wait to be sent (429), the request is poisoned (400)."""
        if not self.connected and not self._models.awaits(spec.model):
            raise unavailable(_UNREACHABLE)
        waiting = len(self._waiting) + sum(session.unsent for session in self.targets.all)
        if waiting >= self._max_outbound:
            raise overloaded(f"More than {self._max_outbound} sequences wait to be sent to the router.")
        if spec in self._poisoned:
            raise from_wire(POISONED)
        leader = None if same_prompt_as is None else self._sequences.get(same_prompt_as)
        eos = self._eos_token_ids(spec.model)
        like = None if leader is None else leader.resumable
        tenant = spec.tenant or spec.session_id
        resumable = Resumable(spec, self._policy, like=like, eos_token_ids=eos)
        group = PromptGroup() if leader is None else leader.group
        sequence = FailoverSequence(next(self._handles), feed, resumable, group, tenant, self)
        self._sequences[sequence.handle] = sequence
        self._place(sequence, asyncio.get_running_loop().time() + self._policy.wait_s)
        return sequence.handle

    def abort(self, handle: int) -> None:
        if (sequence := self._sequences.get(handle)) is not None:
            self._forget(sequence)

    def rendezvous(self, tenant: str, model: str) -> RouterSession | None:
        """Return the router for a tenant's next sequence; None without one, or with several and no tenant."""
        able = self._able(model)
        return self._choose(able, tenant, 0) if tenant or len(able) == 1 else None

    def greeted(self, session: RouterSession, router: str) -> bool:
        """See Listener: several addresses of a name may lead to one router."""
        return all(other.router != router for other in self.targets.all if other is not session)

    def changed(self, session: RouterSession) -> None:
        if not session.connected:
            for other in self.targets.all:
                other.hurry()
        self._models.take([one.models for one in self.targets.all if one.connected])
        for sequence in list(self._waiting.values()):
            self._try(sequence)

    def ended(self, sequence: FailoverSequence, end: common_pb2.SequenceEnd) -> None:
        """Take the end of an attempt: good, or a failure that another attempt may mend."""
        if end.reason in GOOD_ENDS:
            self._finish(sequence, end)
        else:
            self.failed(sequence, Failure.of_end(end))

    def failed(self, sequence: FailoverSequence, failure: Failure) -> None:
        """Retry a sequence, end it with what it has, or end it with an error."""
        loop = asyncio.get_running_loop()
        verdict = sequence.resumable.after(failure, loop.time())
        if isinstance(verdict, Retry):
            if not failure.refused:
                self._on_resumed(verdict.cause)
            _log.debug("sequence is retried", request=sequence.resumable.request_id, cause=verdict.cause)
            sequence.timer = loop.call_later(verdict.delay_s, self._place, sequence, verdict.until)
        elif isinstance(verdict, Finished):
            self._finish(sequence, verdict.end)
        else:
            if isinstance(verdict, GivenUp):
                self._give_up(sequence, verdict.cause)
            if verdict.error.code == common_pb2.ERROR_CODE_POISONED:
                self._poisoned.add(sequence.resumable.spec())
            self._forget(sequence)
            sequence.feed.finish(_failed(from_wire(verdict.error)))

    def unread(self, sequence: FailoverSequence) -> None:
        """End a sequence whose reader is too far behind."""
        self._forget(sequence)
        sequence.feed.finish(_failed(timed_out("The client did not read its stream.", status=408)))

    def _place(self, sequence: FailoverSequence, until: float) -> None:
        """Submit a sequence to a router; if none can take it, wait for one until the loop's time `until`."""
        sequence.timer = None
        if self._try(sequence):
            return
        self._waiting[sequence.handle] = sequence
        loop = asyncio.get_running_loop()
        sequence.timer = loop.call_at(until, self._waited_out, sequence)

    def _try(self, sequence: FailoverSequence) -> bool:
        resumable, group = sequence.resumable, sequence.group
        session = self._router_for(sequence)
        if session is None:
            return False
        if self._waiting.pop(sequence.handle, None) is not None and sequence.timer is not None:
            sequence.timer.cancel()
            sequence.timer = None
        whole = not resumable.emitted and not resumable.quarantined
        leader = group.leader if whole else None
        shares = leader is not None and leader.placed_whole and leader.session is session
        if whole and not shares:
            group.leader = sequence
        submit = common_pb2.Submit(
            spec=resumable.spec(),
            same_prompt_as=leader.stream_handle if shares and leader is not None else None,
            resumed=resumable.resumed,
            alone=resumable.quarantined,
        )
        sequence.tried, sequence.placed_whole, sequence.session = True, whole, session
        sequence.stream_handle = session.submit(submit, sequence)
        return True

    def _router_for(self, sequence: FailoverSequence) -> RouterSession | None:
        model = sequence.resumable.model
        able = self._able(model)
        if able and not able[0].serves(model) and (sequence.tried or self._models.awaits(model)):
            return None
        others = [session for session in able if session is not sequence.refused_by]
        leader = sequence.group.leader
        if leader is not None and leader.session in others:
            return leader.session
        return self._choose(others or able, sequence.tenant, sequence.handle)

    def _able(self, model: str) -> list[RouterSession]:
        """Return the routers that take sequences: those that serve the model, else all."""
        able = [session for session in self.targets.all if session.connected and not session.draining]
        return [session for session in able if session.serves(model)] or able

    def _choose(self, sessions: list[RouterSession], tenant: str, turn: int) -> RouterSession | None:
        if not sessions:
            return None
        return rendezvous(tenant, sessions) if tenant else least_busy(sessions, turn)

    def _eos_token_ids(self, model: str) -> Sequence[int]:
        for session in self.targets.all:
            if (served := session.models.get(model)) is not None:
                return served.info.eos_token_ids
        return ()

    def _finish(self, sequence: FailoverSequence, end: common_pb2.SequenceEnd) -> None:
        sequence.resumable.settle(end.usage)
        self._forget(sequence)
        sequence.feed.finish(ended(end))

    def _waited_out(self, sequence: FailoverSequence) -> None:
        self._give_up(sequence, Cause.UNAVAILABLE)
        self._forget(sequence)
        text = "No engine is serving the model at the moment." if self.connected else _UNREACHABLE
        sequence.feed.finish(_failed(unavailable(text)))

    def _give_up(self, sequence: FailoverSequence, cause: Cause) -> None:
        self._on_given_up(cause)
        _log.warning("sequence given up", request=sequence.resumable.request_id, cause=cause)

    def _forget(self, sequence: FailoverSequence) -> None:
        self._sequences.pop(sequence.handle, None)
        self._waiting.pop(sequence.handle, None)
        sequence.leave()


def _failed(error: ApiError) -> SequenceEnded:
    return SequenceEnded(common_pb2.FINISH_REASON_ERROR, error=error)
