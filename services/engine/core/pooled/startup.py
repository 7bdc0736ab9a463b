"""From options to a pooled core that is ready to step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from catenary.directories import NoHomeError
from services.engine.core.devices import device_of
from services.engine.core.errors import StartError
from services.engine.core.profiler import Profiler
from services.engine.core.startup import open_tracer
from services.engine.core.warming import WarmUpKind, warm_up_kind
from services.engine.device import Device, DeviceError
from services.engine.link import CapacityFacts, CoreReady, ModelFacts
from services.engine.memory import InsufficientMemory
from services.engine.model import ModelError, Task, check_directory, class_labels, read_facts
from services.engine.model.hf_config import check_weights_fit
from services.engine.model.pooling import Dimensions, Embedder, open_embedder, read_dimensions
from services.engine.options import EngineOptions
from services.engine.tracing import StepTracer

Progress = Callable[[str, float | None], None]


@dataclass(frozen=True, slots=True)
class PooledEngine:
    """A core that is ready to step. `to_warm`: shapes of a warm-up beside serving, of `shapes_to_warm`."""

    embedder: Embedder
    device: Device
    tracer: StepTracer
    profiler: Profiler
    priority_ageing: int
    to_warm: deque[tuple[int, int]]
    shapes_to_warm: int
    ready: CoreReady

    def close(self) -> None:
        """Waits for the device; completes the trace."""
        self.device.close()
        self.tracer.close()


def start_pooled(
    options: EngineOptions, directory: Path, task: Task, progress: Progress, device: Device | None = None
) -> PooledEngine:
    """Loads a checked directory's model onto the device of the options unless one is given.

    Raises StartError.
    """
    if options.role != "both":
        raise StartError(
            f"role {options.role} is for models that generate, and this one is served to {task.value}"
        )
    try:
        # What it would compile is not captured here: documents run eagerly, on what is the best for that.
        device = device or device_of(options.model_copy(update={"compile": False}))
        return _start(options, directory, task, progress, device)
    except (ModelError, DeviceError, NoHomeError, InsufficientMemory, ValueError) as error:
        raise StartError(" ".join(str(error).split())) from error
    except Exception as error:
        if device is None or not device.out_of_memory(error):
            raise
        raise StartError(
            "the device's memory is full while the engine starts: lower max-model-len or "
            "max-num-batched-tokens, or choose a smaller model"
        ) from error


def _start(
    options: EngineOptions, directory: Path, task: Task, progress: Progress, device: Device
) -> PooledEngine:
    config = check_directory(directory)
    check_weights_fit(directory, config, options.dtype, device)
    progress("loading weights", 0.3)
    device.tell = lambda text: progress(text, 0.3)
    embedder = open_embedder(
        directory,
        device,
        task=task,
        dtype=options.dtype,
        max_model_len=options.max_model_len,
        max_tokens=options.max_num_batched_tokens,
        backend=options.model_backend,
    )
    dimensions = Dimensions()
    if task is Task.EMBED:
        dimensions = read_dimensions(config, options.embedding_dimensions, embedder.dim)
    shapes = embedder.shapes.all()
    device.expect_shapes(len(shapes))
    to_warm = _warm_up(warm_up_kind(options, device), embedder, device, progress)
    tracer = open_tracer(options.trace_steps, options.profile_steps)
    return PooledEngine(
        embedder=embedder,
        device=device,
        tracer=tracer,
        profiler=Profiler(tracer, max_events=options.profile_max_events, device=device.profile),
        priority_ageing=options.priority_ageing_steps,
        to_warm=deque(to_warm),
        shapes_to_warm=len(to_warm),
        ready=CoreReady(
            _facts(directory, task, embedder, dimensions),
            _capacity(options, embedder),
            notes=list(device.notes),
        ),
    )


def _warm_up(
    kind: WarmUpKind, embedder: Embedder, device: Device, progress: Progress
) -> list[tuple[int, int]]:
    """Runs the shapes that are to be run before serving; returns those that are left for later."""
    shapes = list(embedder.shapes.all())
    now, later = shapes, list[tuple[int, int]]()
    if kind is not WarmUpKind.FULL:
        # What fails does so before a request comes: the longest document is the largest forward.
        now = [shapes[0], shapes[-1]]
        later = [shape for shape in shapes if shape not in now] if kind is WarmUpKind.BACKGROUND else []
    with device.warming(embedder.modules):
        for done, (rows, length) in enumerate(now):
            progress(f"warming up, {done} of {len(now)} shapes", 0.8 + 0.2 * done / len(now))
            embedder.rehearse(rows, length)
    return later


def _facts(directory: Path, task: Task, embedder: Embedder, dimensions: Dimensions) -> ModelFacts:
    config = check_directory(directory)
    facts = read_facts(directory, config)
    return ModelFacts(
        max_model_len=embedder.max_length,
        vocab_size=embedder.vocab_size,
        eos_token_ids=list(facts.eos_token_ids),
        dtype=str(embedder.dtype).removeprefix("torch."),
        tokenizer_sha256=facts.tokenizer_sha256,
        task=task.value,
        embedding_width=embedder.dim if task is Task.EMBED else 0,
        embedding_dimensions=list(dimensions.widths),
        any_dimensions=dimensions.any,
        labels=list(class_labels(config)) if task is Task.CLASSIFY else [],
    )


def _capacity(options: EngineOptions, embedder: Embedder) -> CapacityFacts:
    """There is no KV between forwards: the tokens of the largest one stand for it."""
    shapes = embedder.shapes
    return CapacityFacts(
        block_size=1,
        total_blocks=shapes.most_tokens,
        max_running=max(rows for rows, _ in shapes.all()),
        max_waiting=options.max_waiting,
        max_batched_tokens=shapes.most_tokens,
    )
