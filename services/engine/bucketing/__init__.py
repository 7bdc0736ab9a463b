"""Static shapes that forwards are padded to. Pure."""

from __future__ import annotations

from services.engine.bucketing.applying import narrow_limits
from services.engine.bucketing.axes import AXIS_OPTIONS, AxisOptions, BucketAxes, parse_axis
from services.engine.bucketing.bucket import Bucket
from services.engine.bucketing.bucket_file import format_buckets, parse_buckets, read_bucket_file
from services.engine.bucketing.dummy import dummy_decode_lengths, dummy_prefill_chunks
from services.engine.bucketing.exponential import ExponentialRange, exponential_ranges
from services.engine.bucketing.grid import decode_grid, prefill_grid
from services.engine.bucketing.limits import LONG_CONTEXT, BucketLimits
from services.engine.bucketing.linear import LinearRange, linear_ranges
from services.engine.bucketing.padding import PaddingOptions, PaddingRange, padding_ranges
from services.engine.bucketing.plan import (
    STRATEGIES,
    BucketPlan,
    build_plan,
    covers_every_step,
    long_name,
    plan_of,
)
from services.engine.bucketing.ranges import bits, fit_to_pool
from services.engine.bucketing.recording import Recorder

__all__ = [
    "AXIS_OPTIONS",
    "LONG_CONTEXT",
    "STRATEGIES",
    "AxisOptions",
    "Bucket",
    "BucketAxes",
    "BucketLimits",
    "BucketPlan",
    "ExponentialRange",
    "LinearRange",
    "PaddingOptions",
    "PaddingRange",
    "Recorder",
    "bits",
    "build_plan",
    "covers_every_step",
    "decode_grid",
    "dummy_decode_lengths",
    "dummy_prefill_chunks",
    "exponential_ranges",
    "fit_to_pool",
    "format_buckets",
    "linear_ranges",
    "long_name",
    "narrow_limits",
    "padding_ranges",
    "parse_axis",
    "parse_buckets",
    "plan_of",
    "prefill_grid",
    "read_bucket_file",
]
