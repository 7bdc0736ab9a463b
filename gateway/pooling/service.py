"""Runs of a request's documents for vectors or scores, a window of them at a time."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from catenary.telemetry import current_traceparent, new_id, span_here
from catenary.v1 import common_pb2
from gateway.config import GatewayConfig
from gateway.errors import ApiError, internal, timed_out
from gateway.generation.requests import ActiveRequest, QueuePriority, Requests
from gateway.link.inbox import Inbox, SequenceEnded, Session
from gateway.pooling.work import Document, Pooled, Work, render
from gateway.streaming.answers import usage_of
from gateway.text.models import Model
from gateway.text.pool import TokenizerPool

_FULL = 429


class DocumentRun:
    """Running documents, an async context manager: leaving it aborts those that have not ended.

    A document that finds the queues full waits until another one of this request has left them; the window is
    smaller then, and grows again slowly."""

    def __init__(
        self,
        specs: Sequence[common_pb2.SequenceSpec],
        session: Session,
        *,
        window: int,
        deadline: float,
    ) -> None:
        """Prepare the run. `window`: documents submitted and not ended. `deadline`: by the loop's clock."""
        self._specs = specs
        self._session = session
        self._most = self._window = float(window)
        self._deadline = deadline
        # A document yields no tokens; the constructor needs a limit.
        self._inbox = Inbox(1)
        self._live: dict[int, int] = {}
        self._pending = deque(range(len(specs)))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._live.values():
            self._session.abort(handle)

    def interrupt(self, error: Exception) -> None:
        self._inbox.interrupt(error)

    async def vectors(self) -> list[bytes]:
        """Return the documents' vectors, in order. Raises ApiError, or the error of `interrupt`."""
        found = [b""] * len(self._specs)
        self._fill()
        try:
            async with asyncio.timeout_at(self._deadline):
                while self._live:
                    for feed in await self._inbox.wait():
                        self._take(feed.index, feed.take().end, found)
                    self._fill()
        except TimeoutError:
            raise timed_out("The request took longer than the server allows.") from None
        return found

    def _take(self, index: int, end: SequenceEnded | None, found: list[bytes]) -> None:
        if end is None or index not in self._live:
            return
        del self._live[index]
        if end.error is not None:
            self._wait_for_room(index, end.error)
            return
        if not end.vector:
            raise internal()
        found[index] = end.vector
        self._window = min(self._most, self._window + 1 / self._window)

    def _fill(self) -> None:
        while self._pending and len(self._live) + 1 <= self._window:
            index = self._pending.popleft()
            try:
                self._live[index] = self._session.submit(self._specs[index], self._inbox.feed(index))
            except ApiError as error:
                self._wait_for_room(index, error)

    def _wait_for_room(self, index: int, error: ApiError) -> None:
        """Put a document back. Raises `error` unless queues are full and others of this request in them."""
        if error.status != _FULL or not self._live:
            raise error
        self._pending.appendleft(index)
        self._window = float(len(self._live))


class PoolingService:
    """Rendering and submitting of documents. In any case each one ends or is aborted."""

    def __init__(
        self, config: GatewayConfig, requests: Requests, *, session: Session, tokenizers: TokenizerPool
    ) -> None:
        self._session = session
        self._tokenizers = tokenizers
        self._window = config.document_window
        self.requests = requests

    async def run(self, work: Work, model: Model, request: ActiveRequest, *, id_prefix: str) -> Pooled:
        """Compute the answer of an admitted request. It is counted in the metrics.

        Raises:
            ApiError: it is refused, or failed.
            ClientGone: the client hung up.
        """
        timer, caller = request.timer, request.caller
        request_id = new_id(id_prefix)
        with span_here("render"):
            rendering = render(work, model, self._tokenizers, request_id, caller.owner)
            documents = await request.until_gone(rendering)
        await caller.allowance.spend(sum(len(document.token_ids) for document in documents))
        with span_here("pool") as told:
            specs = _specs(request_id, model, work, documents, request.priority)
            told.update({"gen_ai.request.model": model.name, "catenary.documents": len(specs)})
            run = DocumentRun(specs, self._session, window=self._window, deadline=request.deadline)
            with request.interrupting(run):
                async with run:
                    vectors = await run.vectors()
        pooled = Pooled(request_id, int(time.time()), model, work, documents, vectors)
        timer.accept(pooled.prompt_tokens)
        timer.finished(["stop"], usage_of(pooled.prompt_tokens, 0, None), 1)
        return pooled


def _specs(
    request_id: str, model: Model, work: Work, documents: Sequence[Document], priority: QueuePriority
) -> list[common_pb2.SequenceSpec]:
    traceparent = current_traceparent()
    specs = [
        common_pb2.SequenceSpec(
            request_id=f"{request_id}-{index}",
            model=model.name,
            token_ids=document.token_ids,
            traceparent=traceparent,
            pooling=common_pb2.Pooling(
                task=work.task,
                dimensions=work.dimensions,
                second_start=document.second_start or None,
                raw=work.raw or None,
            ),
        )
        for index, document in enumerate(documents)
    ]
    for spec in specs:
        priority.enter(spec)
    return specs
