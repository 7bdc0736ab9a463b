"""The gateway's streams to the routers, and what runs on them."""

from __future__ import annotations

from gateway.link.inbox import Batch, Inbox, SequenceEnded, SequenceFeed
from gateway.link.routers import Routers
from gateway.link.session import Session
from gateway.link.steps import deliver, ended

__all__ = ["Batch", "Inbox", "Routers", "SequenceEnded", "SequenceFeed", "Session", "deliver", "ended"]
