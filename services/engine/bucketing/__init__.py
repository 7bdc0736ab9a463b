"""Static shapes that forwards are padded to. Pure."""

from __future__ import annotations

from services.engine.bucketing.axes import AXIS_OPTIONS, AxisOptions, BucketAxes, parse_axis
from services.engine.bucketing.bucket import (
    LONG_CONTEXT,
    Bucket,
    BucketLimits,
    dummy_decode_lengths,
    dummy_prefill_chunks,
)
from services.engine.bucketing.bucket_file import format_buckets, parse_buckets, read_bucket_file
from services.engine.bucketing.grid import (
    decode_grid,
    missing_decode,
    missing_prefill,
    prefill_grid,
    split_by_limits,
)
from services.engine.bucketing.plan import (
    STRATEGIES,
    BucketPlan,
    build_plan,
    covers_every_step,
    long_name,
    narrow_limits,
    plan_of,
)
from services.engine.bucketing.recording import Recorder
from services.engine.bucketing.strategies import (
    ExponentialRange,
    LinearRange,
    PaddingOptions,
    PaddingRange,
    bits,
    exponential_ranges,
    fit_to_pool,
    linear_ranges,
    padding_ranges,
)

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
    "missing_decode",
    "missing_prefill",
    "narrow_limits",
    "padding_ranges",
    "parse_axis",
    "parse_buckets",
    "plan_of",
    "prefill_grid",
    "read_bucket_file",
    "split_by_limits",
]
