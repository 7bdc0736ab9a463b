"""The engine core: scheduler, runner and device in one process, driven over a link.

Imports no torch by itself.
"""

from __future__ import annotations

from services.engine.core.loop import Profiler
from services.engine.core.outputs import KvEventDelta
from services.engine.core.process import serve

__all__ = ["KvEventDelta", "Profiler", "serve"]
