"""`catenary buckets`: the static shapes of an engine, compared across strategies."""

from __future__ import annotations

from catenary.cli.buckets.config import BucketsConfig
from catenary.cli.buckets.run import run_buckets

__all__ = ["BucketsConfig", "run_buckets"]
