"""Dispatch: sequences between clients and engines. Free of gRPC; the service package is the wire."""

from __future__ import annotations

from services.router.dispatch.call import PlainCall
from services.router.dispatch.dispatcher import Dispatcher
from services.router.dispatch.health import EngineHealth, PoisonBook
from services.router.dispatch.membership import LossReason, Membership, StallWatch
from services.router.dispatch.sequence import AbortCause, EngineLink
from services.router.dispatch.session import Session, SessionOutbox, Sessions
from services.router.dispatch.states import EVENTS, STATES, TRANSITIONS

__all__ = [
    "EVENTS",
    "STATES",
    "TRANSITIONS",
    "AbortCause",
    "Dispatcher",
    "EngineHealth",
    "EngineLink",
    "LossReason",
    "Membership",
    "PlainCall",
    "PoisonBook",
    "Session",
    "SessionOutbox",
    "Sessions",
    "StallWatch",
]
