"""Blocks of KV memory. Pure: it deals in ids, the tensors are the runner's."""

from __future__ import annotations

from services.engine.kv.block_pool import BlockError, BlockMove, BlockPool, OutOfBlocks
from services.engine.kv.events import Cleared, KvEvent, KvEventLog, Removed, Stored

__all__ = [
    "BlockError",
    "BlockMove",
    "BlockPool",
    "Cleared",
    "KvEvent",
    "KvEventLog",
    "OutOfBlocks",
    "Removed",
    "Stored",
]
