"""Blocks of KV memory. Pure: it deals in ids, the tensors are the runner's."""

from __future__ import annotations

from services.engine.kv.block_pool import BlockPool
from services.engine.kv.errors import BlockError, OutOfBlocks

__all__ = ["BlockError", "BlockPool", "OutOfBlocks"]
