"""The gateway's one stream to the router."""

from __future__ import annotations

from gateway.link.inbox import Batch, FoundBeam, Inbox, SequenceEnded, SequenceFeed
from gateway.link.session import RouterSession, Session

__all__ = ["Batch", "FoundBeam", "Inbox", "RouterSession", "SequenceEnded", "SequenceFeed", "Session"]
