"""Work of a core that embeds, scores or classifies: documents, those of like length in one forward."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from catenary.telemetry import get_logger
from services.engine.core.errors import CoreFailure
from services.engine.core.loop import Profiler
from services.engine.core.outputs import StepBuilder
from services.engine.device import Device
from services.engine.domain import CoreErrorCode, FinishReason
from services.engine.link import CoreLoad, CoreReady, GraphLoad, PhaseLoad, StepColumns, SubmitSequence
from services.engine.model.pooling import Embedder
from services.engine.tracing import StepTracer

log = get_logger(__name__)


class Shapes(Protocol):
    """The static shapes of forwards, as EmbedShapes has them."""

    def bucket(self, length: int) -> int:
        """Return the length of the shapes that take a document of `length` tokens."""

    def most_rows(self, length: int) -> int:
        """Return the most documents that a forward of this length takes."""

    def rows_for(self, count: int) -> int:
        """Return the rows of the forward that takes `count` documents."""


@dataclass(slots=True, eq=False)
class Document:
    """A document from its admission to its end. `order`: lower ones are computed first."""

    key: int
    token_ids: list[int]
    dimensions: int
    second_start: int
    priority: int
    raw: bool = False
    order: tuple[int, int] = (0, 0)
    ended: bool = False


@dataclass(frozen=True, slots=True)
class DocumentBatch:
    """Documents that one forward of `rows` x `length` tokens takes."""

    rows: int
    length: int
    documents: tuple[Document, ...]


class DocumentsFull(Exception):
    """No more documents may wait. The text is for the caller."""


class DocumentQueue:
    """Live documents, the most urgent first; those of like length share a forward.

    `ageing`: so many forwards of waiting weigh as much as one level of priority. A document that ends while
    it waits stays in its heap until it comes up; what it holds is dropped at once.
    """

    def __init__(self, shapes: Shapes, *, limit: int, ageing: int) -> None:
        self._shapes = shapes
        self._limit = limit
        self._ageing = ageing
        self._live: dict[int, Document] = {}
        self._heaps: dict[int, list[tuple[tuple[int, int], Document]]] = {}
        self._alone: deque[Document] = deque()
        self._arrivals = 0
        self._batches = 0
        self.tokens = 0
        """Tokens of live documents."""

    def __len__(self) -> int:
        return len(self._live)

    def add(self, document: Document) -> None:
        """Queue a document. Raises DocumentsFull."""
        if len(self._live) >= self._limit:
            raise DocumentsFull(
                f"The engine is full: it holds {self._limit} documents (max_num_seqs plus max_waiting)."
            )
        self._arrivals += 1
        document.order = (document.priority * self._ageing + self._batches, self._arrivals)
        self._live[document.key] = document
        self.tokens += len(document.token_ids)
        heap = self._heaps.setdefault(self._shapes.bucket(len(document.token_ids)), [])
        heapq.heappush(heap, (document.order, document))

    def end(self, key: int) -> Document | None:
        """End a document wherever it stands, and return it; None if it has ended before."""
        document = self._live.pop(key, None)
        if document is not None:
            document.ended = True
            self.tokens -= len(document.token_ids)
            document.token_ids = []
        return document

    def alone(self, documents: tuple[Document, ...]) -> None:
        """Compute each of these by itself, before anything else: their common forward failed."""
        self._alone.extend(documents)

    def next(self) -> DocumentBatch | None:
        """Take the documents of the next forward out of the queue; they live until they are ended."""
        taken: list[Document] = []
        while self._alone and not taken:
            document = self._alone.popleft()
            if not document.ended:
                taken.append(document)
        if not taken:
            taken = self._most_urgent()
        if not taken:
            return None
        self._batches += 1
        length = max(self._shapes.bucket(len(document.token_ids)) for document in taken)
        return DocumentBatch(self._shapes.rows_for(len(taken)), length, tuple(taken))

    def _most_urgent(self) -> list[Document]:
        """Return the most urgent document, with others of its length in their order."""
        heads = [(heap[0][0], length) for length, heap in self._heaps.items() if self._clean(heap)]
        if not heads:
            return []
        _, length = min(heads)
        heap, most = self._heaps[length], self._shapes.most_rows(length)
        taken: list[Document] = []
        while len(taken) < most and self._clean(heap):
            taken.append(heapq.heappop(heap)[1])
        return taken

    def _clean(self, heap: list[tuple[tuple[int, int], Document]]) -> bool:
        """Drop ended documents from the heap's head. Return whether a live one is left."""
        while heap and heap[0][1].ended:
            heapq.heappop(heap)
        return bool(heap)


@dataclass(frozen=True, slots=True)
class PoolingEngine:
    """A started core that pools. `to_warm`: shapes of a warm-up during serving, of `shapes_to_warm`."""

    embedder: Embedder
    device: Device
    tracer: StepTracer
    profiler: Profiler
    priority_ageing: int
    to_warm: deque[tuple[int, int]]
    shapes_to_warm: int
    ready: CoreReady

    def work(self, wake: Callable[[], None], report: Callable[[], None]) -> PoolingWork:
        return PoolingWork(self, report)

    def close(self) -> None:
        """Wait for the device and complete the trace."""
        self.device.stream.close()
        self.tracer.close()


# A document may fail for what is in it. After so many in a row the device is taken for lost.
_MAX_FAILED_DOCUMENTS = 3

_INTERNAL = "The engine failed on this document."
_NO_MEMORY = "The engine's device has no memory for a document of this length."
_NOT_FINITE = "The model's output for this document is not a number."
_NOT_POOLED = "This engine's model does not generate."
_BAD_DOCUMENT = "The document has no tokens, too many, or ids that are outside the vocabulary."


class PoolingWork:
    """Documents of one engine. Implements `loop.Work`."""

    kv_event_delta = None
    patience = None

    def __init__(self, engine: PoolingEngine, report: Callable[[], None]) -> None:
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
        self._columns = StepBuilder()
        self._running = 0
        self._failed = 0
        self._tokens = 0
        self._padding = 0
        self._seen_before = engine.device.execution.shapes.first_seen
        self.steps = 0
        # A servicer that hears nothing for long takes its core for stalled.
        engine.embedder.watch(report)

    @property
    def busy(self) -> bool:
        return bool(len(self._queue))

    @property
    def steppable(self) -> bool:
        """See `loop.Work`: documents wait for nothing but their turn."""
        return self.busy

    def submit(self, message: SubmitSequence) -> None:
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

    def abort(self, key: int) -> None:
        self._end(key, FinishReason.ABORT)

    def step(self) -> bool:
        """Compute the next batch if there is one."""
        with self._tracer.span("plan", self.steps + 1):
            batch = self._queue.next()
        if batch is not None:
            self._compute(batch)
        return batch is not None or bool(self._columns)

    def settle(self) -> None:
        """See `loop.Work`: documents leave no chores."""

    def warm_up(self) -> bool:
        if not self._engine.to_warm:
            return False
        rows, length = self._engine.to_warm.popleft()
        self._embedder.rehearse(rows, length)
        # Shapes that a warm-up meets were not met by serving.
        self._seen_before += 1
        return True

    def take(self) -> StepColumns:
        return self._columns.take()

    def load(self) -> CoreLoad:
        engine = self._engine
        return CoreLoad(
            running=self._running,
            waiting=len(self._queue) - self._running,
            pending_prefill_tokens=self._queue.tokens,
            steps=self.steps,
            graphs=GraphLoad(
                first_seen=self._device.execution.shapes.first_seen - self._seen_before,
                warm=engine.shapes_to_warm - len(engine.to_warm),
                to_warm=engine.shapes_to_warm,
                prefill=PhaseLoad(self._tokens, self._padding),
                device=self._device.execution.counters(),
            ),
        )

    def _refuse(self, document: Document, text: str, code: CoreErrorCode) -> None:
        self._columns.add_document(
            document.key, len(document.token_ids), FinishReason.ERROR, code=code, message=text
        )

    def _compute(self, batch: DocumentBatch) -> None:
        self.steps += 1
        self._running = len(batch.documents)
        ids = [document.token_ids for document in batch.documents]
        seconds = [document.second_start for document in batch.documents]
        try:
            with self._tracer.span("wait", self.steps), self._device.execution.step(self.steps):
                vectors = self._embedder.compute(batch.rows, batch.length, ids, seconds)
        except Exception as error:
            self._failed_batch(batch, error)
        else:
            self._failed = 0
            self._tokens += sum(map(len, ids))
            self._padding += batch.rows * batch.length - sum(map(len, ids))
            with self._tracer.span("commit", self.steps):
                for document, vector in zip(batch.documents, vectors, strict=True):
                    self._finish(document, vector)
        self._profiler.ended(self.steps)
        self._running = 0

    def _failed_batch(self, batch: DocumentBatch, error: Exception) -> None:
        log.error("a step failed", exc_info=error, documents=len(batch.documents))
        if len(batch.documents) > 1:
            self._queue.alone(batch.documents)
            return
        (document,) = batch.documents
        if self._device.memory.out_of_memory(error):
            # The device works on, and shorter documents may well fit.
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
            self._columns.add_document(key, tokens, reason, vector=vector, code=code, message=message)
