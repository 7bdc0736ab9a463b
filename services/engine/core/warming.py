"""Shapes that an engine's warm-up visits, and their order."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from catenary.telemetry import get_logger
from services.engine.core.errors import StartError
from services.engine.core.sizing import Sizing
from services.engine.device import Device
from services.engine.graphs import (
    BackgroundWarmUp,
    CaptureOrder,
    CaptureSchedule,
    CodeCache,
    Graphs,
    Phase,
    Shape,
    WarmUp,
    WarmUpReport,
    count_shapes,
    name_of,
    shapes_in_order,
    split_long,
)
from services.engine.options import EngineOptions
from services.engine.runner import Runner

log = get_logger(__name__)

# A warm-up with more shapes takes hours where each is compiled.
_MANY_SHAPES = 2_000

# Copies of KV by the role of an engine in a prefill/decode split.
_COPIES = {"prefill": Phase.READ, "decode": Phase.WRITE}


class WarmUpKind(Enum):
    """FULL before serving, BACKGROUND during it, SKIP: each shape when it is first needed."""

    FULL = "full"
    BACKGROUND = "background"
    SKIP = "skip"


def warm_up_kind(options: EngineOptions, device: Device) -> WarmUpKind:
    """Return the option's kind; by default FULL where there is something to capture or compile."""
    if options.warmup is not None:
        return WarmUpKind(options.warmup)
    return (
        WarmUpKind.FULL
        if device.execution.mode.captures or device.capabilities.static_shapes
        else WarmUpKind.SKIP
    )


def warm_up(
    kind: WarmUpKind,
    options: EngineOptions,
    device: Device,
    graphs: Graphs,
    runner: Runner,
    sizing: Sizing,
    code: CodeCache | None,
    progress: Callable[[int, int], None],
) -> BackgroundWarmUp | None:
    """Warm up before serving as far as `kind` asks; return what is left to do during it.

    `progress` is told how many shapes are done of how many. Raises StartError if a bucket cannot run at all.
    """
    smallest = ((Phase.PREFILL, sizing.buckets.prefill[0]), (Phase.DECODE, sizing.buckets.decode[0]))
    if kind is WarmUpKind.FULL:
        warm = _warm_up(options, device, graphs, runner, sizing, code)
        if warm.total > _MANY_SHAPES:
            log.warning(
                "the warm-up has many shapes: --bucketing-strategy exponential, a learned bucket file, "
                "a larger --block-size or --warmup background starts sooner",
                shapes=warm.total,
            )
        with device.execution.warming(runner.modules):
            warm.run(progress)
        _refuse_unusable(warm.report)
    else:
        # A failure shows before a request comes.
        for phase, bucket in smallest:
            runner.dummy(phase, bucket)
    graphs.serve()
    if kind is WarmUpKind.BACKGROUND:
        return BackgroundWarmUp(_warm_up(options, device, graphs, runner, sizing, code))
    return None


def _warm_up(
    options: EngineOptions,
    device: Device,
    graphs: Graphs,
    runner: Runner,
    sizing: Sizing,
    code: CodeCache | None,
) -> WarmUp:
    buckets, size = sizing.buckets, sizing.block_size
    prefill = shapes_in_order(
        Phase.PREFILL, buckets.prefill, CaptureOrder(options.graph_prompt_strategy), size
    )
    decode = shapes_in_order(Phase.DECODE, buckets.decode, CaptureOrder(options.graph_decode_strategy), size)
    rest = [shape for phase, counts in runner.tail_counts.items() for shape in count_shapes(phase, counts)]
    rest += decode
    # Shapes that are never captured still have to run once: the device may compile them.
    eager: list[Shape] = count_shapes(Phase.CLEAR, runner.clear_counts)
    eager += count_shapes(Phase.MOVE, runner.move_counts)
    if (copying := _COPIES.get(options.role)) is not None:
        eager += count_shapes(copying, (runner.copies.blocks,))
    if not device.execution.mode.captures:
        eager, prefill, rest = [*eager, *rest, *prefill], [], []
    elif device.execution.budgets_graphs:
        limit = options.max_capture_tokens or options.max_num_batched_tokens
        prefill, long = split_long(prefill, limit)
        eager += long
    schedule = CaptureSchedule(
        prefill, rest, budget=sizing.graph_bytes, prompt_ratio=options.graph_prompt_ratio
    )

    def keep(report: WarmUpReport) -> None:
        if device.execution.budgets_graphs:
            sizing.history.write(report.graph_bytes + report.missing_bytes)
        if code is not None:
            code.seal()

    return WarmUp(graphs, device.memory, runner.dummy, schedule, eager, on_end=keep)


def _refuse_unusable(report: WarmUpReport) -> None:
    """Raise StartError if buckets have no memory now: they have none when a request needs them."""
    if report.unusable:
        smallest = min(report.unusable, key=lambda shape: shape.size)
        raise StartError(
            f"no memory is left to run {len(report.unusable)} buckets, the smallest of them "
            f"{name_of(smallest.phase, smallest.key)}: lower gpu-memory-utilization, kv-cache-gib, "
            "max-num-batched-tokens, max-num-seqs or max-model-len"
        )
