"""The gateway's one stream to the router."""

from __future__ import annotations

from gateway.link.inbox import Inbox, SequenceEnded, SequenceFeed
from gateway.link.session import RouterSession

__all__ = ["Inbox", "RouterSession", "SequenceEnded", "SequenceFeed"]
