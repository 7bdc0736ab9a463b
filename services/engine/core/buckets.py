"""An engine's buckets, from its options."""

from __future__ import annotations

from catenary.directories import expanded
from catenary.telemetry import get_logger
from services.engine.bucketing import (
    BucketLimits,
    BucketPlan,
    build_plan,
)
from services.engine.core.limits import StepLimits
from services.engine.memory import KvPlan
from services.engine.options import EngineOptions

log = get_logger(__name__)


def make_buckets(options: EngineOptions, block_size: int, kv: KvPlan, step: StepLimits) -> BucketPlan:
    """The plan of the strategy for a KV pool of this size. Raises ValueError for bad options, and
    NoHomeError."""
    limits = BucketLimits(
        block_size=block_size,
        max_model_len=kv.max_model_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=step.idle_tokens,
        num_blocks=kv.num_blocks,
        max_prefill_seqs=step.prompts,
        contiguous=options.contiguous_kv,
        max_padded_tokens=step.padded_tokens,
    )
    file = expanded(options.bucketing_file) if options.bucketing_file else None
    plan = build_plan(
        options.bucketing_strategy, limits, padding=options.padding(), file=file, axes=options.axes()
    )
    for note in plan.notes:
        log.warning(note)
    if plan.omitted:
        log.warning(
            "buckets of the file exceed this engine's limits and are left out",
            buckets=[(b.batch, b.query, b.context_blocks) for b in plan.omitted],
        )
    return plan
