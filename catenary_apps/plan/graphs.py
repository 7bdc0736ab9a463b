"""What graphs take: memory and the time to warm them up, from what logs and users have published."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from services.engine.bucketing import Bucket, BucketPlan

_MIB: Final = 2**20
# 48 decode graphs of an 8B model with 32 layers took 161.9 MiB.
_DECODE_BYTES_PER_LAYER: Final = 161.9 * _MIB / 48 / 32
# 15 prefill graphs of it, 9,984 tokens with 32 layers of 4,096 together, took 14.03 GiB: captures that keep
# what lies between (a tensor cache). Captures that free it take 5 to 20 MB, says vLLM's container, 10 for 8B;
# a user saw 20 to 30 GiB for 300.
_KEPT_BYTES_PER_VALUE: Final = 14.03 * 2**30 / (9984 * 32 * 4096)
_MOST_PREFILL_BYTES: Final = 30 * 2**30 / 300
_LEAST_PREFILL_BYTES_PER_LAYER: Final = 10e6 / 32
_LEAST_PREFILL_BYTES: Final = 5e6, 20e6

# 72 graphs of a bfloat16 8B model with 32 layers were warm in 49 s.
_LEAST_SECONDS_PER_LAYER: Final = 49 / 72 / 32
# Users saw 45 s a graph with 126 layers, and 20 to 40 s a graph before that.
_MOST_SECONDS_PER_LAYER: Final = 45 / 126
# An 8B model: 66 s cold in bfloat16, 504 s in FP8; 23 s and 34 s with a recipe cache.
_FP8_FACTOR: Final = 504 / 66
_CACHED_SHARE: Final = 23 / 66
_CACHED_SHARE_FP8: Final = 34 / 504


@dataclass(frozen=True, slots=True)
class Span:
    """From the least to the most that was published."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class GraphEstimate:
    """Graphs of each phase, how many prefills are too long for one, bytes, and seconds of warm-up.

    `kept_bytes`: if captures keep what lies between their inputs and outputs.
    """

    prefill: int
    decode: int
    eager_prefills: int
    bytes: Span
    kept_bytes: float
    cold_s: Span
    cached_s: Span


def estimate_graphs(
    plan: BucketPlan, *, layers: int, hidden: int, max_capture_tokens: int, fp8: bool
) -> GraphEstimate:
    """What the buckets of a plan come to.

    max_capture_tokens: prefills of more tokens, context included, run without a graph. They are compiled all
    the same.
    """
    captured = [b for b in plan.prefill if b.prefill_tokens(plan.block_size) <= max_capture_tokens]
    decode = len(plan.decode) * layers * _DECODE_BYTES_PER_LAYER
    each = min(max(layers * _LEAST_PREFILL_BYTES_PER_LAYER, _LEAST_PREFILL_BYTES[0]), _LEAST_PREFILL_BYTES[1])
    kept = sum(map(_tokens, captured)) * layers * hidden * _KEPT_BYTES_PER_VALUE
    shapes = (len(plan.prefill) + len(plan.decode)) * layers
    low = shapes * _LEAST_SECONDS_PER_LAYER * (_FP8_FACTOR if fp8 else 1)
    high = max(low, shapes * _MOST_SECONDS_PER_LAYER)
    share = _CACHED_SHARE_FP8 if fp8 else _CACHED_SHARE
    return GraphEstimate(
        prefill=len(captured),
        decode=len(plan.decode),
        eager_prefills=len(plan.prefill) - len(captured),
        bytes=Span(decode + len(captured) * each, decode + len(captured) * _MOST_PREFILL_BYTES),
        kept_bytes=decode + kept,
        cold_s=Span(low, high),
        cached_s=Span(low * share, high * share),
    )


def _tokens(bucket: Bucket) -> int:
    return bucket.batch * bucket.query
