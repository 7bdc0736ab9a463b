"""Small schedulers, and steps whose tokens are made up."""

from __future__ import annotations

from dataclasses import replace

from services.engine.bucketing import BucketLimits, build_plan
from services.engine.domain import SamplingOptions
from services.engine.kv import BlockPool
from services.engine.scheduler import (
    Outcome,
    Scheduler,
    SchedulerConfig,
    Scored,
    Sequence,
    SequenceParams,
    StepPlan,
)

BLOCK = 4


def make_scheduler(
    blocks: int = 64,
    *,
    model_len: int = 64,
    seqs: int = 4,
    tokens: int = 16,
    prefills: int = 1,
    ageing: int = 256,
    prefix_caching: bool = False,
    contiguous: bool = False,
) -> tuple[Scheduler, BlockPool]:
    """A scheduler with room for 64 waiting sequences, and its pool of blocks with BLOCK tokens."""
    config = SchedulerConfig(model_len, seqs, 64, tokens, prefills, ageing, contiguous)
    limits = BucketLimits(BLOCK, model_len, seqs, tokens, blocks, prefills, contiguous)
    pool = BlockPool(blocks, BLOCK, prefix_caching=prefix_caching)
    return Scheduler(config, pool, build_plan("exponential", limits)), pool


def make_sequence(
    key: int,
    length: int,
    *,
    first_token: int = 100,
    max_tokens: int = 20,
    priority: int = 0,
    salt: bytes = b"",
    prompt_logprobs: int = -1,
) -> Sequence:
    """A sequence whose prompt is `length` rising tokens."""
    params = SequenceParams(max_tokens, priority=priority)
    params = replace(params, sampling=SamplingOptions(prompt_logprobs=prompt_logprobs))
    return Sequence(key, list(range(first_token, first_token + length)), length, params, salt)


def make_plan(scheduler: Scheduler) -> StepPlan:
    """Plans a step, which must not be empty."""
    plan = scheduler.plan()
    assert plan is not None
    return plan


def commit(scheduler: Scheduler, plan: StepPlan, token: int = 1) -> list[Outcome | Scored]:
    """Commits a step that sampled the same token everywhere."""
    return scheduler.commit(plan, {sequence.key: token for sequence in plan.sampling()})


def make_step(scheduler: Scheduler, token: int = 1) -> StepPlan:
    """Plans a step and commits it."""
    plan = make_plan(scheduler)
    commit(scheduler, plan, token)
    return plan


def chunk_keys(plan: StepPlan) -> list[int]:
    """Keys of the sequences in the prefill forward."""
    return [chunk.sequence.key for chunk in plan.prefills]


def decode_keys(plan: StepPlan) -> list[int]:
    """Keys of the sequences in the decode forward."""
    return [row.sequence.key for row in plan.decodes]
