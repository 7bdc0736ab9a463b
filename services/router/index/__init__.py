"""An index of engines' prefix caches by the names of blocks. Pure."""

from __future__ import annotations

from services.router.index.feed import KvFeed, MalformedKv
from services.router.index.kv_index import KvIndex

__all__ = ["KvFeed", "KvIndex", "MalformedKv"]
