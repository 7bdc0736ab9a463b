"""From options to a core that is ready to step: model, memory, buckets, scheduler, runner, recorder."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from catenary.directories import NoHomeError, expanded, forbids_code, why_no_code
from catenary.telemetry import get_logger
from catenary.version import __version__
from services.engine.bucketing import BucketPlan, Recorder
from services.engine.core.constraints import NO_GRAMMARS, Grammars, open_grammars
from services.engine.core.devices import device_of
from services.engine.core.errors import StartError
from services.engine.core.handover import Handover, open_handover
from services.engine.core.profiler import Profiler
from services.engine.core.sizing import Sizing, size_engine
from services.engine.core.warming import WarmUpKind, warm_up, warm_up_kind
from services.engine.device import Device, DeviceError, ExecutionMode
from services.engine.graphs import BackgroundWarmUp, CodeCache, Graphs
from services.engine.kv import BlockPool
from services.engine.link import CapacityFacts, CoreReady, ModelFacts
from services.engine.memory import InsufficientMemory, history_key
from services.engine.model import (
    DirectoryFacts,
    ModelError,
    check_directory,
    default_cache_dir,
    prepare_model,
    read_facts,
)
from services.engine.model.facts import why_not_longer
from services.engine.model.hf_config import check_weights_fit
from services.engine.model.opening import open_model
from services.engine.model.paged import PagedModel
from services.engine.options import EngineOptions
from services.engine.runner import KvLayout, Runner
from services.engine.scheduler import Finished, Outcome, Scheduler, SchedulerConfig, Scored, StepPlan
from services.engine.tracing import EventFile, StepTracer

log = get_logger(__name__)


class ServingRecorder:
    """Records into a file, or nothing without one.

    Steps overlap: one waits for the step before it. So a step's time counts from its launch, or from the end
    of the step before if that was later.
    """

    def __init__(self, path: Path | None) -> None:
        """Raises ValueError if the file cannot be written."""
        self._recorder = None if path is None else Recorder(path)
        self._launches: dict[int, float] = {}
        self._ended = 0.0

    def launched(self, number: int) -> None:
        """Notes that a step was launched."""
        if self._recorder is not None:
            self._launches[number] = time.perf_counter()

    def ended(self, number: int, plan: StepPlan, *, whole: bool) -> None:
        """Notes that a step ended. `whole`: it computed what was planned, and nothing else ran beside it."""
        if self._recorder is None:
            return
        now = time.perf_counter()
        begun = max(self._launches.pop(number), self._ended)
        self._ended = now
        if whole:
            self._recorder.step(plan.bucket_prefill, plan.bucket_decode, now - begun)

    def outcomes(self, outcomes: Iterable[Outcome | Scored]) -> None:
        """Notes the lengths of the sequences that ended with these outcomes of a step."""
        if self._recorder is None:
            return
        for outcome in outcomes:
            if isinstance(outcome, Finished):
                sequence = outcome.sequence
                self._recorder.sequence(sequence.prompt_len, sequence.num_generated_tokens)

    def idle(self) -> None:
        """Writes what is buffered, while nothing waits for it."""
        if self._recorder is not None:
            self._recorder.flush()


Progress = Callable[[str, float | None], None]

# A model whose config names no limit is given this much context unless the operator says otherwise.
_DEFAULT_CONTEXT = 4096
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Engine:
    """A core that is ready to step."""

    model: PagedModel
    scheduler: Scheduler
    runner: Runner
    graphs: Graphs
    background: BackgroundWarmUp | None
    device: Device
    tracer: StepTracer
    profiler: Profiler
    recorder: ServingRecorder
    max_beam_width: int
    async_stepping: bool
    ready: CoreReady
    code: CodeCache | None
    handover: Handover
    grammars: Grammars = NO_GRAMMARS

    def close(self) -> None:
        """Waits for the device; completes the trace and the recording; keeps what was compiled."""
        self.handover.close()
        self.device.close()
        self.grammars.close()
        self.recorder.idle()
        self.tracer.close()
        if self.code is not None:
            self.code.seal()
            self.code.close()


def start_engine(options: EngineOptions, progress: Progress, device: Device | None = None) -> Engine:
    """Loads everything, onto the device of the options unless one is given. Raises StartError."""
    try:
        device = device or device_of(options)
        return _start(options, progress, device)
    except (ModelError, DeviceError, NoHomeError, InsufficientMemory, ValueError) as error:
        raise StartError(" ".join(str(error).split())) from error
    except Exception as error:
        if device is None or not device.out_of_memory(error):
            raise
        raise StartError(
            f"the device's memory is full ({device.memory().free / _GIB:.2f} GiB are free) while "
            "the engine starts: lower kv-cache-gib or gpu-memory-utilization, or choose a smaller model"
        ) from error


def _start(options: EngineOptions, progress: Progress, device: Device) -> Engine:
    cache = expanded(options.cache_dir) if options.cache_dir else None
    directory, config, facts = _find_model(options, cache, progress)
    limit = _context_limit(options, facts, config)
    recorder = ServingRecorder(expanded(options.record_lengths) if options.record_lengths else None)
    device.adapt(config)
    check_weights_fit(directory, config, options.dtype, device)
    progress("loading weights", 0.3)
    device.tell = lambda text: progress(text, 0.3)
    model = open_model(
        directory,
        device,
        dtype=options.dtype,
        max_model_len=options.max_model_len,
        backend=options.model_backend,
    )
    block_size = options.block_size or device.default_block_size
    code = _open_code_cache(block_size, device, model, directory, cache or default_cache_dir())
    log.info("model loaded", backend=model.backend, weight_bytes=model.weight_bytes())
    grammars = open_grammars(options, directory, model.vocab_size, facts)
    progress("planning memory", 0.7)
    tracer = open_tracer(options.trace_steps, options.profile_steps)
    make_runner = _runner_maker(options, block_size, model, device, tracer)
    sizing = size_engine(options, block_size, device, model, limit, cache or default_cache_dir(), make_runner)
    kv, buckets = sizing.kv, sizing.buckets
    device.expect_shapes(len(buckets.prefill) + len(buckets.decode))
    kind = warm_up_kind(options, device)
    graphs = Graphs(device, block_size=block_size, on_demand=kind is WarmUpKind.SKIP, tracer=tracer)
    runner = make_runner(kv.num_blocks, graphs, buckets)

    def warming(done: int, total: int) -> None:
        progress(f"warming up, {done} of {total} shapes", 0.8 + 0.2 * done / max(1, total))

    progress("warming up", 0.8)
    background = warm_up(kind, options, device, graphs, runner, sizing, code, warming)
    scheduler = _make_scheduler(options, sizing)
    return Engine(
        model=model,
        scheduler=scheduler,
        runner=runner,
        graphs=graphs,
        background=background,
        device=device,
        tracer=tracer,
        profiler=Profiler(tracer, max_events=options.profile_max_events, device=device.profile),
        recorder=recorder,
        max_beam_width=options.max_beam_width,
        async_stepping=options.async_stepping,
        ready=_ready(options, model, facts, sizing, device.notes),
        code=code,
        handover=open_handover(options, sizing, model, directory, config, scheduler, runner.copies),
        grammars=grammars,
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


def _find_model(
    options: EngineOptions, cache: Path | None, progress: Progress
) -> tuple[Path, Mapping[str, Any], DirectoryFacts]:
    progress("reading the model's files", 0.1)
    directory = prepare_model(
        options.model,
        cache_dir=cache,
        progress=lambda line: progress(line, None),
        convert_s=options.convert_timeout_s,
    )
    config = check_directory(directory)
    facts = read_facts(directory, config)
    if facts.ignored_sampling:
        log.warning("defaults of generation_config.json are not honoured", names=list(facts.ignored_sampling))
    return directory, config, facts


def _context_limit(options: EngineOptions, facts: DirectoryFacts, config: Mapping[str, Any]) -> int:
    """Tokens of the longest sequence that the model knows, or is asked to go to beyond that.

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


def _open_code_cache(
    block_size: int, device: Device, model: PagedModel, directory: Path, cache: Path
) -> CodeCache | None:
    """Compiles the model's layers where the mode says so, into a cache for the next start."""
    if device.mode is ExecutionMode.COMPILE:
        if device.regional_compilation:
            model.compile_parts(norms_and_head=device.compiles_parts)
        else:
            model.compile_whole()
    if not device.keeps_code:
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
    device.keep_code(code.code)
    return code


def open_tracer(path: Path | None, steps: str | None) -> StepTracer:
    """The tracer of these options. Raises StartError if its file cannot be written."""
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
            default_temperature=facts.temperature,
            default_top_p=facts.top_p,
            default_top_k=facts.top_k,
            default_min_p=facts.min_p,
            default_repetition_penalty=facts.repetition_penalty,
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
