"""From options to a core that is ready to step: model, memory, buckets, scheduler, runner."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from catenary.telemetry import get_logger
from services.engine.bucketing import BucketLimits, BucketPlan, PaddingOptions, build_plan
from services.engine.core.errors import StartError
from services.engine.core.options import CoreOptions
from services.engine.device import Device, DeviceError, open_device
from services.engine.graphs import Graphs, Phase
from services.engine.kv import BlockPool
from services.engine.link import CapacityFacts, CoreReady, ModelFacts
from services.engine.model import DirectoryFacts, ModelError, check_directory, prepare_model, read_facts
from services.engine.model.paged import PagedModel
from services.engine.model.transformers_backend import load_model
from services.engine.runner import InsufficientMemory, KvLayout, KvPlan, Runner, StepTracer, plan_kv
from services.engine.scheduler import Scheduler, SchedulerConfig

log = get_logger(__name__)

Progress = Callable[[str, float | None], None]

# A model whose config names no limit is given this much context unless the operator says otherwise.
_DEFAULT_CONTEXT = 4096
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Engine:
    """A core that is ready to step."""

    scheduler: Scheduler
    runner: Runner
    graphs: Graphs
    device: Device
    tracer: StepTracer
    async_stepping: bool
    ready: CoreReady

    def close(self) -> None:
        """Waits for the device and completes the trace."""
        self.device.close()
        self.tracer.close()


def start_engine(options: CoreOptions, progress: Progress) -> Engine:
    """Loads everything. Raises StartError."""
    try:
        return _start(options, progress)
    except (ModelError, DeviceError, InsufficientMemory, ValueError) as error:
        raise StartError(" ".join(str(error).split())) from error


def _start(options: CoreOptions, progress: Progress) -> Engine:
    device = open_device(options.device, threads=options.device_threads or None)
    progress("looking for the model", 0.1)
    cache = Path(options.cache_dir).expanduser() if options.cache_dir else None
    directory = prepare_model(options.model, cache_dir=cache, progress=lambda line: progress(line, None))
    facts = read_facts(directory, check_directory(directory))
    if facts.ignored_sampling:
        log.warning("defaults of generation_config.json are not honoured", names=list(facts.ignored_sampling))
    limit = facts.max_position or options.max_model_len or _DEFAULT_CONTEXT
    if options.max_model_len is not None and options.max_model_len > limit:
        raise StartError(
            f"max-model-len {options.max_model_len} exceeds the model's context of {limit} tokens"
        )
    progress("loading weights", 0.3)
    model = load_model(directory, device, dtype=options.dtype, max_model_len=options.max_model_len)
    progress("allocating the KV cache", 0.8)
    kv = plan_kv(
        budget_bytes=_kv_budget(options, device),
        bytes_per_token=model.kv_bytes_per_token(),
        block_size=options.block_size,
        max_num_seqs=options.max_num_seqs,
        model_limit=limit,
        max_model_len=options.max_model_len,
    )
    buckets = _buckets(options, kv)
    tracer = _open_tracer(options.trace_steps)
    graphs = Graphs(device, block_size=options.block_size)
    runner = Runner(
        model,
        device,
        KvLayout(options.block_size, kv.num_blocks),
        graphs,
        max_num_seqs=options.max_num_seqs,
        tracer=tracer,
    )
    progress("warming up", 0.9)
    # What fails does so before a request comes.
    runner.dummy(Phase.PREFILL, buckets.prefill[0])
    runner.dummy(Phase.DECODE, buckets.decode[0])
    graphs.serve()
    scheduler = Scheduler(
        SchedulerConfig(
            max_model_len=kv.max_model_len,
            max_num_seqs=options.max_num_seqs,
            max_waiting=options.max_waiting,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_prefill_seqs=options.max_prefill_batch,
        ),
        BlockPool(kv.num_blocks, options.block_size),
        buckets,
    )
    ready = _ready(options, model, facts, kv)
    return Engine(scheduler, runner, graphs, device, tracer, options.async_stepping, ready)


def _open_tracer(path: str | None) -> StepTracer:
    try:
        return StepTracer(Path(path) if path else None)
    except OSError as error:
        raise StartError(f"trace-steps {path} cannot be written: {error.strerror}") from None


def _kv_budget(options: CoreOptions, device: Device) -> int:
    """Bytes for KV: what the operator says, else what the device allows."""
    if options.kv_cache_gib is None:
        return device.kv_budget(options.gpu_memory_utilization)
    wanted, free = math.floor(options.kv_cache_gib * _GIB), device.memory().free
    if wanted > free:
        raise StartError(
            f"kv-cache-gib {options.kv_cache_gib:g} exceeds the {free / _GIB:.2f} GiB of memory that are free"
        )
    return wanted


def _buckets(options: CoreOptions, kv: KvPlan) -> BucketPlan:
    limits = BucketLimits(
        block_size=options.block_size,
        max_model_len=kv.max_model_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        num_blocks=kv.num_blocks,
        max_prefill_seqs=options.max_prefill_batch,
    )
    padding = PaddingOptions(
        ratio=options.bucketing_pad_ratio,
        max_rows=options.bucketing_pad_max_rows,
        max_tokens=options.bucketing_pad_max_tokens,
        max_context=options.bucketing_pad_max_context,
        max_blocks=options.bucketing_pad_max_blocks,
    )
    file = Path(options.bucketing_file).expanduser() if options.bucketing_file else None
    plan = build_plan(options.bucketing_strategy, limits, padding=padding, file=file)
    if plan.omitted:
        log.warning(
            "buckets of the file exceed this engine's limits and are left out",
            buckets=[(b.batch, b.query, b.context_blocks) for b in plan.omitted],
        )
    return plan


def _ready(options: CoreOptions, model: PagedModel, facts: DirectoryFacts, kv: KvPlan) -> CoreReady:
    return CoreReady(
        model=ModelFacts(
            max_model_len=kv.max_model_len,
            vocab_size=model.vocab_size,
            eos_token_ids=list(facts.eos_token_ids),
            dtype=str(model.dtype).removeprefix("torch."),
            tokenizer_sha256=facts.tokenizer_sha256,
            default_temperature=facts.temperature,
            default_top_p=facts.top_p,
            default_top_k=facts.top_k,
        ),
        capacity=CapacityFacts(
            block_size=options.block_size,
            total_blocks=kv.num_blocks,
            max_running=options.max_num_seqs,
            max_waiting=options.max_waiting,
            max_batched_tokens=options.max_num_batched_tokens,
        ),
    )
