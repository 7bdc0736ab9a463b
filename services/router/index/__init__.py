"""What engines' prefix caches hold, block name by block name. Pure."""

from __future__ import annotations

from services.router.index.feed import KvFeed, MalformedKv
from services.router.index.kv_index import KvIndex

__all__ = ["KvFeed", "KvIndex", "MalformedKv"]
