"""Dispatch: sequences between clients and engines. Free of gRPC; the service package is the wire."""

from __future__ import annotations

from services.router.dispatch.call import PlainCall
from services.router.dispatch.dispatcher import Dispatcher
from services.router.dispatch.health import EngineHealth, PoisonBook
from services.router.dispatch.membership import LossReason, Membership
from services.router.dispatch.outbox import SessionOutbox
from services.router.dispatch.publication import KvPublication
from services.router.dispatch.sequence import AbortCause, EngineLink
from services.router.dispatch.session import Session, SessionHub
from services.router.dispatch.watch import ReaderWatch, StallWatch

__all__ = [
    "AbortCause",
    "Dispatcher",
    "EngineHealth",
    "EngineLink",
    "KvPublication",
    "LossReason",
    "Membership",
    "PlainCall",
    "PoisonBook",
    "ReaderWatch",
    "Session",
    "SessionHub",
    "SessionOutbox",
    "StallWatch",
]
