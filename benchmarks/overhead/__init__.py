"""What the overhead benchmarks have in common: a lean client, a played router, a played core, CPU times."""

from __future__ import annotations

from benchmarks.overhead.played_router import PlayedRouter
from benchmarks.overhead.sse_client import SseConnection, Times
from benchmarks.overhead.usage import CpuMeter

__all__ = ["CpuMeter", "PlayedRouter", "SseConnection", "Times"]
