"""Which request goes before which: its number within an engine, its class in the router's queues."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from catenary.v1 import common_pb2
from gateway.caller import Caller


@dataclass(frozen=True, slots=True)
class Standing:
    """How a request waits for an engine; entered in each of its sequences."""

    priority: int = 0
    priority_class: common_pb2.PriorityClass.ValueType = common_pb2.PRIORITY_CLASS_UNSPECIFIED
    tenant: str = ""
    session_id: str = ""
    max_wait_ms: int | None = None

    def enter(self, spec: common_pb2.SequenceSpec) -> None:
        """Write it into a sequence."""
        if self.priority:
            spec.priority = self.priority
        spec.priority_class = self.priority_class
        if self.tenant:
            spec.tenant = self.tenant
        if self.session_id:
            spec.session_id = self.session_id
        if self.max_wait_ms is not None:
            spec.max_wait_ms = self.max_wait_ms


@dataclass(frozen=True, slots=True)
class Priorities:
    """Numbers of the service tiers; lower ones are computed first, and a request without a tier has 0.

    `max_wait_ms`: longest wait of a request that names none; None: the router's.
    """

    priority: int
    flex: int
    max_wait_ms: int | None = None

    def of(self, number: int | None, tier: str | None) -> int:
        """A request's own number, else its tier's."""
        if number is not None:
            return number
        return {"priority": self.priority, "flex": self.flex}.get(tier or "", 0)

    def standing(
        self, caller: Caller, number: int | None, tier: str | None = None, session: str | None = None
    ) -> Standing:
        """How a request of `caller` waits.

        Its class is that of its header; else BULK in a batch; else by its number: INTERACTIVE below 0,
        DEFAULT at 0, BULK above. `session`: what its body says of whom it belongs to; the header goes first.
        """
        priority = self.of(number, tier)
        return Standing(
            priority=priority,
            priority_class=_class(caller, priority),
            tenant=caller.owner,
            session_id=_session(caller, session),
            max_wait_ms=self.max_wait_ms if caller.max_wait_ms is None else caller.max_wait_ms,
        )


def _class(caller: Caller, priority: int) -> common_pb2.PriorityClass.ValueType:
    if caller.priority_class != common_pb2.PRIORITY_CLASS_UNSPECIFIED:
        return caller.priority_class
    if caller.bulk or priority > 0:
        return common_pb2.PRIORITY_CLASS_BULK
    return common_pb2.PRIORITY_CLASS_INTERACTIVE if priority < 0 else common_pb2.PRIORITY_CLASS_DEFAULT


def _session(caller: Caller, session: str | None) -> str:
    """A name of bounded length; that of one tenant is never another's."""
    named = caller.session_id or session
    if not named:
        return ""
    return hashlib.blake2b(f"{caller.owner}\n{named}".encode(), digest_size=16, person=b"session").hexdigest()
