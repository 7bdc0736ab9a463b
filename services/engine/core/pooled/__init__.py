"""The core of an engine whose model embeds or scores: documents in batches of static shape."""

from __future__ import annotations

from services.engine.core.pooled.loop import PooledLoop
from services.engine.core.pooled.queue import Document, DocumentQueue
from services.engine.core.pooled.startup import start_pooled

__all__ = ["Document", "DocumentQueue", "PooledLoop", "start_pooled"]
