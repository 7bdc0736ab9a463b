"""Documents that wait, and which of them the next forward takes. Pure."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from typing import Protocol


class Shapes(Protocol):
    """The static shapes of forwards, as EmbedShapes has them."""

    def bucket(self, length: int) -> int:
        """The length of the shapes that take a document of `length` tokens."""

    def most_rows(self, length: int) -> int:
        """The most documents that a forward of this length takes."""

    def rows_for(self, count: int) -> int:
        """The rows of the forward that takes `count` documents."""


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
        """The document is over, wherever it stands; None if it was before."""
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
        """The most urgent document, with others of its length in their order."""
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
        """Drop ended documents from the heap's head; whether one that lives is there."""
        while heap and heap[0][1].ended:
            heapq.heappop(heap)
        return bool(heap)
