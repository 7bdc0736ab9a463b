"""`catenary bench`: load on a server, and batches in this process."""

from __future__ import annotations

from catenary_apps.bench.main import run_bench
from catenary_apps.bench.options import BenchServeConfig, BenchThroughputConfig

__all__ = ["BenchServeConfig", "BenchThroughputConfig", "run_bench"]
