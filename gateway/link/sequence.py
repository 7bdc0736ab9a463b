"""A sequence of the gateway in all of its lives: which router has it, and what its reader got."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from catenary.resume import Failure, Resumable
from catenary.v1 import common_pb2
from gateway.link.inbox import SequenceFeed
from gateway.link.router_session import RouterSession
from gateway.streaming.delta import TokenLogprob


class Owner(Protocol):
    """Decides what becomes of a sequence whose life ends."""

    def ended(self, sequence: LinkedSequence, end: common_pb2.SequenceEnd) -> None:
        """The end of a life: good, or a failure that another one may mend."""

    def failed(self, sequence: LinkedSequence, failure: Failure) -> None:
        """A life ended without an end."""

    def unread(self, sequence: LinkedSequence) -> None:
        """Its reader is too far behind."""


class PromptGroup:
    """Sequences with one prompt. `leader`: the one that computes it for the others, on the router where it
    was submitted last; None before the first one."""

    __slots__ = ("leader",)

    def __init__(self) -> None:
        self.leader: LinkedSequence | None = None


class LinkedSequence:
    """The receiver of a sequence's lives, one after another. Its owner changes the fields."""

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
        owner: Owner,
    ) -> None:
        """`tenant`: what is kept on one router."""
        self.handle = handle
        self.feed = feed
        self.resumable = resumable
        self.group = group
        self.tenant = tenant
        self._owner = owner
        self.session: RouterSession | None = None
        self.stream_handle = 0
        # Whether this life began with the prompt alone, so that others can share it.
        self.placed_whole = False
        self.tried = False
        self.refused_by: RouterSession | None = None
        self.timer: asyncio.TimerHandle | None = None

    def extend(
        self, ids: list[int], logprobs: list[TokenLogprob], prompt: Sequence[TokenLogprob] = ()
    ) -> bool:
        """See Receiver."""
        if prompt:
            prompt = prompt[self.resumable.record_prompt(len(prompt)) :]
        if not self.feed.extend(ids, logprobs, prompt):
            return False
        self.resumable.record(ids)
        return True

    def ended(self, end: common_pb2.SequenceEnd) -> None:
        """See Receiver."""
        self.session = None
        self._owner.ended(self, end)

    def refused(self, error: common_pb2.Error) -> None:
        """See Receiver."""
        self.refused_by, self.session = self.session, None
        self._owner.failed(self, Failure.of_refusal(error))

    def lost(self) -> None:
        """See Receiver."""
        self.session = None
        self._owner.failed(self, Failure.router_lost())

    def unread(self) -> None:
        """See Receiver."""
        self.session = None
        self._owner.unread(self)

    def leave(self) -> None:
        """Nothing more is wanted of it, from any router."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        if self.session is not None:
            self.session.abort(self.stream_handle)
            self.session = None
        if self.group.leader is self:
            self.group.leader = None
