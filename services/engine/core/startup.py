"""From options and a model's directory to an engine that is ready to step.

One path for all tasks up to the weights; then the task decides what is made around the model.
"""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from catenary.directories import NoHomeError, expanded, forbids_code, why_no_code
from catenary.telemetry import get_logger
from catenary.version import __version__
from services.engine.bucketing import BucketPlan
from services.engine.core.constraints import open_grammars
from services.engine.core.errors import StartError
from services.engine.core.generation import GeneratingEngine, ServingRecorder
from services.engine.core.handover import open_handover
from services.engine.core.loop import Profiler
from services.engine.core.sizing import Sizing, size_engine
from services.engine.core.warming import WarmUpKind, warm_up, warm_up_kind
from services.engine.device import Device, DeviceError, ExecutionMode, open_device
from services.engine.graphs import CodeCache, Graphs
from services.engine.kv import BlockPool
from services.engine.link import CapacityFacts, CoreReady, ModelFacts
from services.engine.memory import InsufficientMemory, history_key
from services.engine.model import (
    DirectoryFacts,
    ModelError,
    Task,
    check_directory,
    class_labels,
    default_cache_dir,
    read_facts,
)
from services.engine.model.facts import why_not_longer
from services.engine.model.hf_config import check_weights_fit
from services.engine.model.open_model import open_model
from services.engine.model.paged import PagedModel
from services.engine.options import EngineOptions
from services.engine.runner import KvLayout, Runner
from services.engine.scheduler import Scheduler, SchedulerConfig
from services.engine.tracing import EventFile, StepTracer

if TYPE_CHECKING:
    from services.engine.core.pooling import PoolingEngine
    from services.engine.model.pooling import Dimensions, Embedder

log = get_logger(__name__)

Progress = Callable[[str, float | None], None]

# Context of a model whose config names no limit, unless the operator gives one.
_DEFAULT_CONTEXT = 4096
_GIB = 2**30


def open_engine(
    options: EngineOptions, directory: Path, task: Task, progress: Progress, device: Device | None = None
) -> GeneratingEngine | PoolingEngine:
    """Load a checked directory's model, onto the device of the options unless one is given.

    Raises StartError.
    """
    generates = task is Task.GENERATE
    if not generates and options.role != "both":
        raise StartError(
            f"role {options.role} is for models that generate, and this one is served to {task.value}"
        )
    # Documents run eagerly: nothing is captured or compiled for them.
    options = options.model_copy(update={"model": str(directory)} if generates else {"compile": False})
    try:
        device = device or open_device(options)
        progress("reading the model's files", 0.1)
        config = check_directory(directory)
        source = _Source(options, directory, config, read_facts(directory, config), device, progress)
        return _open_generating(source) if generates else _open_pooling(source, task)
    except (ModelError, DeviceError, NoHomeError, InsufficientMemory, ValueError) as error:
        raise StartError(" ".join(str(error).split())) from error
    except Exception as error:
        if device is None or not device.memory.out_of_memory(error):
            raise
        raise StartError(_memory_is_full(device, generates=generates)) from error


def _memory_is_full(device: Device, *, generates: bool) -> str:
    if not generates:
        return (
            "the device's memory is full while the engine starts: lower max-model-len or "
            "max-num-batched-tokens, or choose a smaller model"
        )
    return (
        f"the device's memory is full ({device.memory.figures().free / _GIB:.2f} GiB are free) while "
        "the engine starts: lower kv-cache-gib or gpu-memory-utilization, or choose a smaller model"
    )


@dataclass(frozen=True, slots=True)
class _Source:
    """A model's files, not loaded yet, and the device that they go to."""

    options: EngineOptions
    directory: Path
    config: Mapping[str, Any]
    facts: DirectoryFacts
    device: Device
    progress: Progress

    def begin_loading(self) -> None:
        """Check that the weights fit, and show the progress of loading them."""
        check_weights_fit(self.directory, self.config, self.options.dtype, self.device)
        self.progress("loading weights", 0.3)
        self.device.notices.progress = lambda text: self.progress(text, 0.3)

    def profiler(self, tracer: StepTracer) -> Profiler:
        """Return the profiler of the steps that `tracer` traces."""
        return Profiler(tracer, max_events=self.options.profile_max_events, device=self.device.stream.profile)


def _open_generating(source: _Source) -> GeneratingEngine:
    options, device, directory, facts = source.options, source.device, source.directory, source.facts
    cache = expanded(options.cache_dir) if options.cache_dir else default_cache_dir()
    if facts.ignored_sampling:
        log.warning("defaults of generation_config.json are not honoured", names=list(facts.ignored_sampling))
    limit = _context_limit(options, facts, source.config)
    recorder = ServingRecorder(expanded(options.record_lengths) if options.record_lengths else None)
    device.kernels.adapt(source.config)
    source.begin_loading()
    model = open_model(
        directory,
        device,
        dtype=options.dtype,
        max_model_len=options.max_model_len,
        backend=options.model_backend,
    )
    block_size = options.block_size or device.capabilities.block_size
    code = open_code_cache(block_size, device, model, directory, cache)
    log.info("model loaded", backend=model.backend, weight_bytes=model.weight_bytes())
    grammars = open_grammars(options, directory, model.vocab_size, facts)
    source.progress("planning memory", 0.7)
    tracer = _open_tracer(options.trace_steps, options.profile_steps)
    make_runner = _runner_maker(options, block_size, model, device, tracer)
    sizing = size_engine(options, block_size, device, model, limit, cache, make_runner)
    kv, buckets = sizing.kv, sizing.buckets
    device.execution.expect_shapes(len(buckets.prefill) + len(buckets.decode))
    kind = warm_up_kind(options, device)
    graphs = Graphs(device, block_size=block_size, on_demand=kind is WarmUpKind.SKIP, tracer=tracer)
    runner = make_runner(kv.num_blocks, graphs, buckets)

    def warming(done: int, total: int) -> None:
        source.progress(f"warming up, {done} of {total} shapes", 0.8 + 0.2 * done / max(1, total))

    source.progress("warming up", 0.8)
    background = warm_up(kind, options, device, graphs, runner, sizing, code, warming)
    scheduler = _make_scheduler(options, sizing)
    return GeneratingEngine(
        model=model,
        scheduler=scheduler,
        runner=runner,
        graphs=graphs,
        background=background,
        device=device,
        tracer=tracer,
        profiler=source.profiler(tracer),
        recorder=recorder,
        max_beam_width=options.max_beam_width,
        async_stepping=options.async_stepping,
        ready=_ready(options, model, facts, sizing, device.notices.notes),
        code=code,
        handover=open_handover(options, sizing, model, directory, source.config, scheduler, runner.copies),
        grammars=grammars,
    )


def _open_pooling(source: _Source, task: Task) -> PoolingEngine:
    options, device = source.options, source.device
    # Loaded here and not above: encoders take a second of imports, which engines that generate do not need.
    engines: Any = importlib.import_module("services.engine.core.pooling")
    pooling: Any = importlib.import_module("services.engine.model.pooling")
    source.begin_loading()
    embedder: Embedder = pooling.open_embedder(
        source.directory,
        device,
        task=task,
        dtype=options.dtype,
        max_model_len=options.max_model_len,
        max_tokens=options.max_num_batched_tokens,
        backend=options.model_backend,
    )
    dimensions: Dimensions = pooling.Dimensions()
    if task is Task.EMBED:
        dimensions = pooling.read_dimensions(source.config, options.embedding_dimensions, embedder.dim)
    device.execution.expect_shapes(len(embedder.shapes.all()))
    to_warm = _warm_up_pooling(warm_up_kind(options, device), embedder, device, source.progress)
    tracer = _open_tracer(options.trace_steps, options.profile_steps)
    engine: PoolingEngine = engines.PoolingEngine(
        embedder=embedder,
        device=device,
        tracer=tracer,
        profiler=source.profiler(tracer),
        priority_ageing=options.priority_ageing_steps,
        to_warm=deque(to_warm),
        shapes_to_warm=len(to_warm),
        ready=CoreReady(
            _pooling_facts(source, task, embedder, dimensions),
            _pooling_capacity(options, embedder),
            notes=list(device.notices.notes),
        ),
    )
    return engine


def _warm_up_pooling(
    kind: WarmUpKind, embedder: Embedder, device: Device, progress: Progress
) -> list[tuple[int, int]]:
    """Run the shapes that are due before serving; return those that are left for later."""
    shapes = list(embedder.shapes.all())
    now, later = shapes, list[tuple[int, int]]()
    if kind is not WarmUpKind.FULL:
        # A failure shows before a request comes: the longest document is the largest forward.
        now = [shapes[0], shapes[-1]]
        later = [shape for shape in shapes if shape not in now] if kind is WarmUpKind.BACKGROUND else []
    with device.execution.warming(embedder.modules):
        for done, (rows, length) in enumerate(now):
            progress(f"warming up, {done} of {len(now)} shapes", 0.8 + 0.2 * done / len(now))
            embedder.rehearse(rows, length)
    return later


def _pooling_facts(source: _Source, task: Task, embedder: Embedder, dimensions: Dimensions) -> ModelFacts:
    return ModelFacts(
        max_model_len=embedder.max_length,
        vocab_size=embedder.vocab_size,
        eos_token_ids=list(source.facts.eos_token_ids),
        dtype=str(embedder.dtype).removeprefix("torch."),
        tokenizer_sha256=source.facts.tokenizer_sha256,
        task=task.value,
        embedding_width=embedder.dim if task is Task.EMBED else 0,
        embedding_dimensions=list(dimensions.widths),
        any_dimensions=dimensions.any,
        labels=list(class_labels(source.config)) if task is Task.CLASSIFY else [],
    )


def _pooling_capacity(options: EngineOptions, embedder: Embedder) -> CapacityFacts:
    """Return the capacity, with the tokens of the largest forward in place of KV, which there is not."""
    shapes = embedder.shapes
    return CapacityFacts(
        block_size=1,
        total_blocks=shapes.most_tokens,
        max_running=max(rows for rows, _ in shapes.all()),
        max_waiting=options.max_waiting,
        max_batched_tokens=shapes.most_tokens,
    )


def _runner_maker(
    options: EngineOptions, block_size: int, model: PagedModel, device: Device, tracer: StepTracer
) -> Callable[[int, Graphs, BucketPlan], Runner]:
    def make_runner(num_blocks: int, graphs: Graphs, buckets: BucketPlan) -> Runner:
        return Runner(
            model,
            device,
            KvLayout(block_size, num_blocks, options.contiguous_kv),
            graphs,
            max_num_seqs=options.max_num_seqs,
            max_block_moves=options.max_block_moves,
            prefill_buckets=buckets.prefill,
            beams=options.max_beam_width > 0 and not options.contiguous_kv,
            tracer=tracer,
        )

    return make_runner


def _context_limit(options: EngineOptions, facts: DirectoryFacts, config: Mapping[str, Any]) -> int:
    """Return the tokens of the longest sequence: of the model, or beyond that if the options allow it.

    Raises StartError if the options want more and do not allow it, or the model cannot.
    """
    limit, wanted = facts.max_position or options.max_model_len or _DEFAULT_CONTEXT, options.max_model_len
    if wanted is None or wanted <= limit:
        return limit
    refusal = f"max-model-len {wanted} exceeds the model's context of {limit} tokens"
    if not options.allow_long_max_model_len:
        raise StartError(refusal)
    if reason := why_not_longer(config):
        raise StartError(f"{refusal}, and allow-long-max-model-len does not help: {reason}")
    log.warning("sequences may be longer than the model was trained for", max_model_len=wanted, trained=limit)
    return wanted


def _make_scheduler(options: EngineOptions, sizing: Sizing) -> Scheduler:
    kv, step = sizing.kv, sizing.step
    return Scheduler(
        SchedulerConfig(
            max_model_len=kv.max_model_len,
            max_num_seqs=options.max_num_seqs,
            max_waiting=options.max_waiting,
            max_num_batched_tokens=step.tokens,
            max_idle_batched_tokens=step.idle_tokens,
            max_prefill_seqs=step.prompts,
            priority_ageing_steps=options.priority_ageing_steps,
            contiguous=options.contiguous_kv,
            max_block_moves=options.max_block_moves,
        ),
        BlockPool(kv.num_blocks, sizing.block_size, prefix_caching=options.enable_prefix_caching),
        sizing.buckets,
    )


def open_code_cache(
    block_size: int, device: Device, model: PagedModel, directory: Path, cache: Path
) -> CodeCache | None:
    """Compile the model's layers where the mode says so, into a cache for the next start."""
    if device.execution.mode is ExecutionMode.COMPILE:
        if device.execution.regional_compilation:
            model.compile_parts(norms_and_head=device.execution.compiles_parts)
        else:
            model.compile_whole()
    if not device.execution.keeps_code:
        return None
    key = history_key(
        torch=torch.__version__,
        catenary=__version__,
        config=(directory / "config.json").read_text(encoding="utf-8"),
        dtype=str(model.dtype),
        block_size=block_size,
    )
    code = CodeCache(cache / "compiled" / key)
    if forbids_code(code.code):
        raise StartError(f"compile: {why_no_code(cache)}")
    try:
        code.open()
    except OSError as error:
        raise StartError(f"compile cache {code.code} cannot be used: {error.strerror}") from None
    device.execution.keep_code(code.code)
    return code


def _open_tracer(path: Path | None, steps: str | None) -> StepTracer:
    """Return the tracer of these options. Raises StartError if its file cannot be written."""
    if path is None:
        return StepTracer()
    start, count = map(int, steps.split(":")) if steps else (1, 0)
    try:
        return StepTracer(EventFile(path, range(start, start + count) if count else None))
    except OSError as error:
        raise StartError(f"trace-steps {path} cannot be written: {error.strerror}") from None


def _ready(
    options: EngineOptions, model: PagedModel, facts: DirectoryFacts, sizing: Sizing, notes: list[str]
) -> CoreReady:
    return CoreReady(
        model=ModelFacts(
            max_model_len=sizing.kv.max_model_len,
            vocab_size=model.vocab_size,
            eos_token_ids=list(facts.eos_token_ids),
            dtype=str(model.dtype).removeprefix("torch."),
            tokenizer_sha256=facts.tokenizer_sha256,
            sampling_defaults=dict(facts.sampling_defaults),
        ),
        capacity=CapacityFacts(
            block_size=sizing.block_size,
            total_blocks=sizing.kv.num_blocks,
            max_running=options.max_num_seqs,
            max_waiting=options.max_waiting,
            max_batched_tokens=options.max_num_batched_tokens,
        ),
        publishes_kv=options.enable_prefix_caching,
        notes=list(notes),
    )
