"""Sizes of an engine's KV, steps and buckets, from the options and the free memory of its device."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import torch

from catenary.directories import expanded
from catenary.telemetry import get_logger
from services.engine.bucketing import (
    AXIS_OPTIONS,
    Bucket,
    BucketLimits,
    BucketPlan,
    build_plan,
)
from services.engine.device import Device
from services.engine.graphs import Graphs, Key, Phase, name_of, size_of
from services.engine.memory import (
    GraphHistory,
    GraphReserve,
    InsufficientMemory,
    KvPlan,
    MemoryPlan,
    ModelFigures,
    estimate_activations,
    history_key,
    memory_table,
    plan_kv,
    plan_memory,
)
from services.engine.model.paged import PagedModel
from services.engine.options import EngineOptions
from services.engine.runner import Runner

log = get_logger(__name__)


# Where padding costs nothing: a prompt that comes alone is computed in fewer pieces, and of short prompts as
# many together as the tokens allow.
_IDLE: Final = 2
_PROMPTS: Final = 16
# Where a forward computes its padding, and its shapes are many.
_PADDED_PROMPTS: Final = 4


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Limits of steps.

    tokens: of a step, prompts and decodes together; idle_tokens: of prompts in a step in which nothing
    decodes; prompts: computed together; padded_tokens: of a prefill forward, padding included.
    """

    tokens: int
    idle_tokens: int
    prompts: int
    padded_tokens: int


def step_limits(options: EngineOptions, model: PagedModel) -> StepLimits:
    """Return the limits of the options, or the best ones for the way in which the model is computed."""
    tokens, free = options.max_num_batched_tokens, model.skips_padding
    # Listed buckets are for the tokens of a step.
    listed = options.bucketing_file is not None
    idle = options.max_idle_batched_tokens or (_IDLE * tokens if free and not listed else tokens)
    prompts = options.max_prefill_batch or (_PROMPTS if free else _PADDED_PROMPTS)
    return StepLimits(tokens, idle, prompts, padded_tokens=2 * idle if free and not listed else idle)


def make_buckets(options: EngineOptions, block_size: int, kv: KvPlan, step: StepLimits) -> BucketPlan:
    """Return the plan of the strategy for a KV pool of this size. Raises ValueError for bad options, and
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


_GIB = 2**30

MakeRunner = Callable[[int, Graphs, BucketPlan], Runner]
"""Makes a runner with a KV pool of so many blocks, for these buckets."""


@dataclass(frozen=True, slots=True)
class Sizing:
    """Sizes of an engine. `block_size`: tokens; `graph_bytes`: budget of captures, None without one."""

    block_size: int
    kv: KvPlan
    step: StepLimits
    buckets: BucketPlan
    memory: MemoryPlan
    history: GraphHistory
    graph_bytes: int | None


def size_engine(
    options: EngineOptions,
    block_size: int,
    device: Device,
    model: PagedModel,
    model_limit: int,
    cache: Path,
    make_runner: MakeRunner,
) -> Sizing:
    """Plan the memory, log it as a table, and build the buckets.

    `model_limit`: the longest sequence that the model knows. Raises InsufficientMemory with the numbers.
    """
    history = GraphHistory(cache, _history_key(options, block_size, device, model, model_limit))
    # Before anything is profiled: without activations. A model that does not fit now never will.
    figures = device.memory.figures()
    plan = partial(
        plan_memory,
        total=figures.total,
        weights=model.weight_bytes(),
        free=figures.free,
        utilization=options.gpu_memory_utilization,
        kv_bytes=None if options.kv_cache_gib is None else math.floor(options.kv_cache_gib * _GIB),
        kv_limit=device.capabilities.kv_limit,
        padding=model.kv_bytes_per_token() * block_size,
    )
    # More blocks than all sequences can use keep prefixes; a slice from the cache's start has no use for
    # them, and a CPU's memory is not the engine's alone.
    spare = (
        options.enable_prefix_caching and not options.contiguous_kv and device.capabilities.kv_limit is None
    )
    divide = partial(_divide, options, block_size, model, model_limit, spare)
    rough, step = divide(plan(activations=0, reserve=GraphReserve())), step_limits(options, model)
    buckets = make_buckets(options, block_size, rough, step)
    activations = _activations(options, block_size, device, model, buckets, make_runner)
    prior = GraphReserve(options.graph_reserved_mem if device.execution.reserves_graphs else 0.0)
    measured = history.read() if device.execution.budgets_graphs else None
    try:
        memory = plan(activations=activations, reserve=GraphReserve(prior.share, measured))
        kv = divide(memory)
    except InsufficientMemory:
        # Graphs can do with less; a sequence cannot.
        memory = plan(activations=activations, reserve=prior)
        kv = divide(memory)
    block_bytes = model.kv_bytes_per_token() * block_size
    for line in memory_table(
        memory, kv, block_bytes=block_bytes, activations_measured=device.capabilities.measures_activations
    ):
        log.info(line)
    budget = memory.graphs if device.execution.budgets_graphs else None
    if kv != rough:
        buckets = make_buckets(options, block_size, kv, step)
    return Sizing(block_size, kv, step, buckets, memory, history, budget)


def _divide(
    options: EngineOptions,
    block_size: int,
    model: PagedModel,
    model_limit: int,
    spare: bool,
    memory: MemoryPlan,
) -> KvPlan:
    return plan_kv(
        budget_bytes=memory.kv,
        bytes_per_token=model.kv_bytes_per_token(),
        block_size=block_size,
        max_num_seqs=options.max_num_seqs,
        model_limit=model_limit,
        max_model_len=options.max_model_len,
        spare=spare,
    )


def _activations(
    options: EngineOptions,
    block_size: int,
    device: Device,
    model: PagedModel,
    buckets: BucketPlan,
    make_runner: MakeRunner,
) -> int:
    """Return the bytes of the largest forwards: measured by running them on padding, or estimated."""
    prefill = _largest(Phase.PREFILL, buckets.prefill, block_size)
    decode = _largest(Phase.DECODE, buckets.decode, block_size)
    if not device.capabilities.measures_activations:
        figures = ModelFigures(
            hidden_size=model.hidden_size,
            vocab_size=model.vocab_size,
            heads=max(1, model.hidden_size // model.layers[0].key_dim),
            kv_bytes_per_token=max(
                layer.kv_heads * (layer.key_dim + layer.value_dim) * model.dtype.itemsize
                for layer in model.layers
            ),
            item_size=model.dtype.itemsize,
        )
        return estimate_activations(
            figures, prefill, decode, block_size=block_size, rows=options.max_num_seqs
        )
    runner = make_runner(1, Graphs(device, block_size=block_size, on_demand=False), buckets)
    shapes: list[tuple[Phase, Key]] = [(Phase.PREFILL, prefill), (Phase.DECODE, decode)]
    shapes += [(phase, max(counts)) for phase, counts in runner.tail_counts.items()]
    return runner.tail_bytes + max(_profile(device, runner, phase, key) for phase, key in shapes)


def _profile(device: Device, runner: Runner, phase: Phase, key: Key) -> int:
    free = device.memory.figures().free
    try:
        return device.memory.measure(lambda: runner.dummy(phase, key)).peak
    except Exception as error:
        if not device.memory.out_of_memory(error):
            raise
        raise InsufficientMemory(
            f"the largest {name_of(phase, key)} does not fit the {free / _GIB:.2f} GiB that are free "
            "beside the weights: lower max-num-batched-tokens, max-num-seqs or max-model-len"
        ) from error


def _largest(phase: Phase, buckets: tuple[Bucket, ...], block_size: int) -> Bucket:
    return max(buckets, key=lambda bucket: (size_of(phase, bucket, block_size), bucket))


def _history_key(
    options: EngineOptions, block_size: int, device: Device, model: PagedModel, model_limit: int
) -> str:
    step = step_limits(options, model)
    return history_key(
        torch=torch.__version__,
        device=device.name,
        mode=device.execution.mode.value,
        model=(options.model, model.weight_bytes(), [str(layer) for layer in model.layers]),
        dtype=str(model.dtype),
        limit=options.max_model_len or model_limit,
        shapes=(
            block_size,
            options.max_num_seqs,
            step.tokens,
            step.idle_tokens,
            step.prompts,
            options.max_capture_tokens,
            options.contiguous_kv,
            options.bucketing_strategy,
            None if options.bucketing_file is None else str(options.bucketing_file),
            options.bucketing_pad_ratio,
            options.bucketing_pad_max_rows,
            options.bucketing_pad_max_tokens,
            options.bucketing_pad_max_context,
            options.bucketing_pad_max_blocks,
            *(getattr(options, name) for name in AXIS_OPTIONS),
        ),
        attention=(
            options.kernels,
            options.attention_softmax,
            options.attention_slice_from,
            options.attention_slice_chunk,
        ),
    )
