"""`catenary buckets`: the static shapes of an engine, compared across strategies."""

from __future__ import annotations

from catenary_apps.buckets.config import BucketsConfig
from catenary_apps.buckets.run import run_buckets

__all__ = ["BucketsConfig", "run_buckets"]
