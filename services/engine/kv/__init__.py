"""Blocks of KV memory. Pure: it deals in ids, the tensors are the runner's."""

from __future__ import annotations

from services.engine.kv.block_pool import BlockPool
from services.engine.kv.errors import BlockError, OutOfBlocks
from services.engine.kv.events import Cleared, KvEventLog, Removed, Stored
from services.engine.kv.moves import BlockMove
from services.engine.kv.news import KvNews, net_changes

__all__ = [
    "BlockError",
    "BlockMove",
    "BlockPool",
    "Cleared",
    "KvEventLog",
    "KvNews",
    "OutOfBlocks",
    "Removed",
    "Stored",
    "net_changes",
]
