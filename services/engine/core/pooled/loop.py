"""The loop of a pooled core: drain the link, compute the next batch of documents, report their vectors.

One forward at a time in one thread: it leaves nothing behind, so there is nothing to prepare beside it.
"""

from __future__ import annotations

import torch

from catenary.telemetry import get_logger
from services.engine.core.errors import CoreFailure
from services.engine.core.pooled.columns import DocumentColumns
from services.engine.core.pooled.queue import Document, DocumentBatch, DocumentQueue, DocumentsFull
from services.engine.core.pooled.startup import PooledEngine
from services.engine.domain import CoreErrorCode, FinishReason
from services.engine.link import (
    AbortSequences,
    BlockingLink,
    CancelProfile,
    CoreLoad,
    CoreStep,
    GraphLoad,
    PhaseLoad,
    StartProfile,
    StopCore,
    SubmitSequence,
    ToCore,
)

# A document may fail for what is in it. When one after the other fails by itself, the device is lost.
_MAX_FAILED_DOCUMENTS = 3

_INTERNAL = "The engine failed on this document."
_NO_MEMORY = "The engine's device has no memory for a document of this length."
_NOT_FINITE = "The model's output for this document is not a number."
_NOT_POOLED = "This engine's model does not generate."
_BAD_DOCUMENT = "The document has no tokens, too many, or ids that are outside the vocabulary."

log = get_logger(__name__)


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
