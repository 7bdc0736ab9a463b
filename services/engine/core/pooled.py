"""The core of an engine whose model embeds, scores or classifies: from options to batches of documents."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from catenary.directories import NoHomeError
from catenary.telemetry import get_logger
from services.engine.core.devices import device_of
from services.engine.core.documents import Document, DocumentBatch, DocumentQueue, DocumentsFull
from services.engine.core.errors import CoreFailure, StartError
from services.engine.core.profiler import Profiler
from services.engine.core.startup import open_tracer
from services.engine.core.warming import WarmUpKind, warm_up_kind
from services.engine.device import Device, DeviceError
from services.engine.domain import CoreErrorCode, FinishReason
from services.engine.link import (
    AbortSequences,
    BlockingLink,
    CancelProfile,
    CapacityFacts,
    CoreLoad,
    CoreReady,
    CoreStep,
    EndRow,
    GraphLoad,
    ModelFacts,
    PhaseLoad,
    StartProfile,
    StepColumns,
    StopCore,
    SubmitSequence,
    ToCore,
)
from services.engine.memory import InsufficientMemory
from services.engine.model import ModelError, Task, check_directory, class_labels, read_facts
from services.engine.model.hf_config import check_weights_fit
from services.engine.model.pooling import Dimensions, Embedder, open_embedder, read_dimensions
from services.engine.options import EngineOptions
from services.engine.tracing import StepTracer

log = get_logger(__name__)


class DocumentColumns:
    """Collects ends; a document has no other rows."""

    def __init__(self) -> None:
        self._columns = StepColumns([], [], [], [], [], [], [], [], [])

    def __bool__(self) -> bool:
        return bool(self._columns.keys)

    def add(
        self,
        document: Document,
        tokens: int,
        reason: FinishReason,
        *,
        vector: bytes | None = None,
        code: CoreErrorCode | None = None,
        message: str | None = None,
    ) -> None:
        """The end of a document that had `tokens` tokens."""
        columns = self._columns
        columns.keys.append(document.key)
        columns.token_counts.append(0)
        columns.ends.append(
            EndRow(
                row=len(columns.keys) - 1,
                reason=reason,
                prompt_tokens=tokens,
                cached_tokens=0,
                completion_tokens=0,
                error_code=code,
                error_message=message,
                vector=vector,
            )
        )

    def take(self) -> StepColumns:
        """Returns the columns and starts the next ones."""
        columns, self._columns = self._columns, StepColumns([], [], [], [], [], [], [], [], [])
        return columns


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


# A document may fail for what is in it. When one after the other fails by itself, the device is lost.
_MAX_FAILED_DOCUMENTS = 3

_INTERNAL = "The engine failed on this document."
_NO_MEMORY = "The engine's device has no memory for a document of this length."
_NOT_FINITE = "The model's output for this document is not a number."
_NOT_POOLED = "This engine's model does not generate."
_BAD_DOCUMENT = "The document has no tokens, too many, or ids that are outside the vocabulary."


class PooledLoop:
    """Runs one engine until the servicer stops it or goes away."""

    def __init__(self, link: BlockingLink, engine: PooledEngine) -> None:
        self._link = link
        self._engine = engine
        self._embedder = engine.embedder
        self._device = engine.device
        self._tracer = engine.tracer
        self._profiler = engine.profiler
        capacity = engine.ready.capacity
        self._queue = DocumentQueue(
            engine.embedder.shapes,
            limit=capacity.max_running + capacity.max_waiting,
            ageing=engine.priority_ageing,
        )
        self._columns = DocumentColumns()
        self._running = 0
        self._stopping = False
        self._steps = 0
        self._failed = 0
        self._tokens = 0
        self._padding = 0
        self._seen_before = engine.device.shapes.first_seen
        # A servicer that hears nothing for long takes its core for stalled.
        engine.embedder.watch(self._report)

    def run(self) -> None:
        """Returns after StopCore. Raises LinkClosed at the link's end, CoreFailure, or a defect's error."""
        self._report()
        while not self._stopping:
            self.advance()
            for part in self._profiler.due():
                self._link.send(part)
            patience = 0.0 if self.busy or self._warm_up() else self._profiler.remaining
            for message in self._link.poll(patience):
                self.handle(message)

    @property
    def busy(self) -> bool:
        """True while a document lives."""
        return bool(len(self._queue))

    def handle(self, message: ToCore) -> None:
        """Takes one message. Whatever it ends is reported with the next step."""
        match message:
            case SubmitSequence():
                self._submit(message)
            case AbortSequences(keys=keys):
                for key in keys:
                    self._end(key, FinishReason.ABORT)
            case StartProfile():
                self._profiler.start(message, self._steps)
            case CancelProfile():
                self._profiler.cancel(message)
            case StopCore():
                self._stopping = True
            case _:
                raise CoreFailure(f"the servicer sent {type(message).__name__} to a running core")

    def advance(self) -> None:
        """Computes the next batch if there is one, and reports what there is."""
        with self._tracer.span("plan", self._steps + 1):
            batch = self._queue.next()
        if batch is not None:
            self._compute(batch)
        if batch is not None or self._columns:
            self._report()

    def _warm_up(self) -> bool:
        """Goes on with a warm-up beside serving, for an idle engine; True if there was something to do."""
        if not self._engine.to_warm:
            return False
        rows, length = self._engine.to_warm.popleft()
        self._embedder.rehearse(rows, length)
        # What a warm-up meets was not met by serving.
        self._seen_before += 1
        self._report()
        return True

    def _submit(self, message: SubmitSequence) -> None:
        ids, pooling = message.token_ids, message.pooling
        document = Document(message.key, ids, 0, 0, message.priority)
        if pooling is None:
            self._refuse(document, _NOT_POOLED, CoreErrorCode.INVALID_ARGUMENT)
            return
        document.dimensions, document.second_start = pooling.dimensions, pooling.second_start
        document.raw = pooling.raw
        known = 1 <= len(ids) <= self._embedder.max_length and min(ids) >= 0
        if not known or max(ids) >= self._embedder.vocab_size:
            self._refuse(document, _BAD_DOCUMENT, CoreErrorCode.INVALID_ARGUMENT)
            return
        try:
            self._queue.add(document)
        except DocumentsFull as refusal:
            self._refuse(document, str(refusal), CoreErrorCode.OVERLOADED)

    def _refuse(self, document: Document, text: str, code: CoreErrorCode) -> None:
        self._columns.add(document, len(document.token_ids), FinishReason.ERROR, code=code, message=text)

    def _compute(self, batch: DocumentBatch) -> None:
        self._steps += 1
        self._running = len(batch.documents)
        ids = [document.token_ids for document in batch.documents]
        seconds = [document.second_start for document in batch.documents]
        try:
            with self._tracer.span("wait", self._steps), self._device.step(self._steps):
                vectors = self._embedder.compute(batch.rows, batch.length, ids, seconds)
        except Exception as error:
            self._failed_batch(batch, error)
        else:
            self._failed = 0
            self._tokens += sum(map(len, ids))
            self._padding += batch.rows * batch.length - sum(map(len, ids))
            with self._tracer.span("commit", self._steps):
                for document, vector in zip(batch.documents, vectors, strict=True):
                    self._finish(document, vector)
        self._profiler.ended(self._steps)
        self._running = 0

    def _failed_batch(self, batch: DocumentBatch, error: Exception) -> None:
        log.exception("a step failed", documents=len(batch.documents))
        if len(batch.documents) > 1:
            self._queue.alone(batch.documents)
            return
        (document,) = batch.documents
        if self._device.out_of_memory(error):
            # The device goes on, and shorter documents may well fit.
            self._fail(document, _NO_MEMORY, CoreErrorCode.OVERLOADED)
            return
        self._failed += 1
        if self._failed >= _MAX_FAILED_DOCUMENTS:
            text = f"{self._failed} documents failed in a row: {type(error).__name__}"
            raise CoreFailure(text) from error
        self._fail(document, _INTERNAL, CoreErrorCode.INTERNAL)

    def _finish(self, document: Document, vector: torch.Tensor) -> None:
        vector = self._embedder.finish(vector, dimensions=document.dimensions, raw=document.raw)
        if not bool(vector.isfinite().all()):
            self._fail(document, _NOT_FINITE, CoreErrorCode.INTERNAL)
            return
        self._end(document.key, FinishReason.STOP, vector=vector.numpy().astype("<f4").tobytes())

    def _fail(self, document: Document, text: str, code: CoreErrorCode) -> None:
        self._end(document.key, FinishReason.ERROR, code=code, message=text)

    def _end(
        self,
        key: int,
        reason: FinishReason,
        *,
        vector: bytes | None = None,
        code: CoreErrorCode | None = None,
        message: str | None = None,
    ) -> None:
        before = self._queue.tokens
        document = self._queue.end(key)
        if document is not None:
            tokens = before - self._queue.tokens
            self._columns.add(document, tokens, reason, vector=vector, code=code, message=message)

    def _report(self) -> None:
        load = self._load()
        self._tracer.counters("sequences", running=load.running, waiting=load.waiting)
        self._link.send(CoreStep(columns=self._columns.take(), load=load))

    def _load(self) -> CoreLoad:
        engine = self._engine
        return CoreLoad(
            running=self._running,
            waiting=len(self._queue) - self._running,
            pending_prefill_tokens=self._queue.tokens,
            steps=self._steps,
            graphs=GraphLoad(
                first_seen=self._device.shapes.first_seen - self._seen_before,
                warm=engine.shapes_to_warm - len(engine.to_warm),
                to_warm=engine.shapes_to_warm,
                prefill=PhaseLoad(self._tokens, self._padding),
                device=self._device.counters(),
            ),
        )
