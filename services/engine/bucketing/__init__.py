"""Static shapes that forwards are padded to. Pure.

Each strategy that is imported here is a value of the option bucketing_strategy.
"""

from __future__ import annotations

from services.engine.bucketing.axes import AXIS_OPTIONS, AxisOptions, BucketAxes, PaddingOptions, parse_axis
from services.engine.bucketing.bucket import (
    LONG_CONTEXT,
    Bucket,
    BucketLimits,
    dummy_decode_lengths,
    dummy_prefill_chunks,
)
from services.engine.bucketing.bucket_file import format_buckets, parse_buckets, read_bucket_file
from services.engine.bucketing.exponential import Exponential, ExponentialRange, bits
from services.engine.bucketing.grid import (
    decode_grid,
    missing_decode,
    missing_prefill,
    prefill_grid,
    split_by_limits,
)
from services.engine.bucketing.linear import Linear, LinearRange
from services.engine.bucketing.padding import Padding, PaddingRange
from services.engine.bucketing.plan import (
    BucketPlan,
    build_plan,
    covers_every_step,
    narrow_limits,
    plan_of,
)
from services.engine.bucketing.recording import Recorder
from services.engine.bucketing.strategy import (
    FILE,
    STRATEGIES,
    check_axes,
    fit_to_pool,
    long_name,
    strategy_names,
    taken_axes,
    takers,
    vllm_names,
)

__all__ = [
    "AXIS_OPTIONS",
    "FILE",
    "LONG_CONTEXT",
    "STRATEGIES",
    "AxisOptions",
    "Bucket",
    "BucketAxes",
    "BucketLimits",
    "BucketPlan",
    "Exponential",
    "ExponentialRange",
    "Linear",
    "LinearRange",
    "Padding",
    "PaddingOptions",
    "PaddingRange",
    "Recorder",
    "bits",
    "build_plan",
    "check_axes",
    "covers_every_step",
    "decode_grid",
    "dummy_decode_lengths",
    "dummy_prefill_chunks",
    "fit_to_pool",
    "format_buckets",
    "long_name",
    "missing_decode",
    "missing_prefill",
    "narrow_limits",
    "parse_axis",
    "parse_buckets",
    "plan_of",
    "prefill_grid",
    "read_bucket_file",
    "split_by_limits",
    "strategy_names",
    "taken_axes",
    "takers",
    "vllm_names",
]
