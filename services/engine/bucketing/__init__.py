"""Static shapes that forwards are padded to. Pure."""

from __future__ import annotations

from services.engine.bucketing.bucket import Bucket
from services.engine.bucketing.exponential import ExponentialRange, exponential_ranges
from services.engine.bucketing.grid import decode_grid, prefill_grid
from services.engine.bucketing.limits import BucketLimits
from services.engine.bucketing.linear import LinearRange, linear_ranges
from services.engine.bucketing.plan import STRATEGIES, BucketPlan, build_plan, plan_from
from services.engine.bucketing.ranges import AxisRange, BucketRanges

__all__ = [
    "STRATEGIES",
    "AxisRange",
    "Bucket",
    "BucketLimits",
    "BucketPlan",
    "BucketRanges",
    "ExponentialRange",
    "LinearRange",
    "build_plan",
    "decode_grid",
    "exponential_ranges",
    "linear_ranges",
    "plan_from",
    "prefill_grid",
]
