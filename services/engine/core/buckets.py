"""An engine's buckets, from its options."""

from __future__ import annotations

from catenary.directories import expanded
from catenary.telemetry import get_logger
from services.engine.bucketing import (
    AXIS_OPTIONS,
    BucketAxes,
    BucketLimits,
    BucketPlan,
    PaddingOptions,
    build_plan,
)
from services.engine.core.limits import StepLimits
from services.engine.core.options import CoreOptions
from services.engine.memory import KvPlan

log = get_logger(__name__)


def make_buckets(options: CoreOptions, kv: KvPlan, step: StepLimits) -> BucketPlan:
    """The plan of the strategy for a KV pool of this size. Raises ValueError for bad options, and
    NoHomeError."""
    limits = BucketLimits(
        block_size=options.block_size,
        max_model_len=kv.max_model_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=step.idle_tokens,
        num_blocks=kv.num_blocks,
        max_prefill_seqs=step.prompts,
        contiguous=options.contiguous_kv,
        max_padded_tokens=step.padded_tokens,
    )
    padding = PaddingOptions(
        ratio=options.bucketing_pad_ratio,
        max_rows=options.bucketing_pad_max_rows,
        max_tokens=options.bucketing_pad_max_tokens,
        max_context=options.bucketing_pad_max_context,
        max_blocks=options.bucketing_pad_max_blocks,
    )
    file = expanded(options.bucketing_file) if options.bucketing_file else None
    axes = BucketAxes.parse({name: getattr(options, name) for name in AXIS_OPTIONS})
    plan = build_plan(options.bucketing_strategy, limits, padding=padding, file=file, axes=axes)
    for note in plan.notes:
        log.warning(note)
    if plan.omitted:
        log.warning(
            "buckets of the file exceed this engine's limits and are left out",
            buckets=[(b.batch, b.query, b.context_blocks) for b in plan.omitted],
        )
    return plan
