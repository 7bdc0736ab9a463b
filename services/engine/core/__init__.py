"""The engine core: scheduler, runner and device in one process, driven over a link.

Imports no torch by itself.
"""

from __future__ import annotations

from services.engine.core.kv_news import KvNews
from services.engine.core.process import serve
from services.engine.core.profiler import Profiler

__all__ = ["KvNews", "Profiler", "serve"]
