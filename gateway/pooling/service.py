"""From an HTTP request to its answer, for every route that computes vectors or scores."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Any, ClassVar, Generic, Self, TypeVar

from starlette.types import Receive, Scope, Send

from catenary.telemetry import current_traceparent, new_id, span_here
from catenary.v1 import common_pb2
from gateway.auth import Caller, caller_of
from gateway.config import GatewayConfig
from gateway.errors import ApiError, internal, timed_out, unavailable
from gateway.generation.plan import QueuePriority
from gateway.generation.service import GenerationService
from gateway.http.answers import send_json
from gateway.http.disconnect import ClientGone, ClientWatch
from gateway.link.inbox import Inbox, SequenceEnded, Session
from gateway.metrics import GatewayMetrics, RequestTimer
from gateway.pooling.work import Document, Pooled, Work, render
from gateway.schemas.base import RequestLimits
from gateway.schemas.pooling import PooledFields
from gateway.streaming.writer import usage_of
from gateway.text.models import Model, ModelRegistry
from gateway.text.pool import TokenizerPool

_FULL = 429


class DocumentRun:
    """Use as an async context manager: leaving it aborts what has not ended, whatever the reason.

    A document that finds the queues full waits until another one of this request has left them; the window
    is smaller then, and grows again slowly.
    """

    def __init__(
        self,
        specs: Sequence[common_pb2.SequenceSpec],
        session: Session,
        *,
        window: int,
        deadline: float,
    ) -> None:
        """`window`: documents that are submitted and have not ended. `deadline`: by the loop's clock."""
        self._specs = specs
        self._session = session
        self._most = self._window = float(window)
        self._deadline = deadline
        # A document gives no tokens; the limit is there to be passed.
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
        """Make `vectors` raise."""
        self._inbox.interrupt(error)

    async def vectors(self) -> list[bytes]:
        """The documents' vectors, in order. Raises ApiError, or the error of `interrupt`."""
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
        """Puts a document back. Raises `error` unless queues are full and others of this request in them."""
        if error.status != _FULL or not self._live:
            raise error
        self._pending.appendleft(index)
        self._window = float(len(self._live))


T = TypeVar("T", bound=PooledFields)


class PooledTask(ABC, Generic[T]):
    """What a request asks to be computed: how it is read, and what its documents are."""

    id_prefix: ClassVar[str]
    """What ids of its answers begin with."""
    tasks: ClassVar[tuple[int, ...]]
    """Of the models that it works with."""

    @abstractmethod
    def parse(self, body: dict[str, Any], limits: RequestLimits) -> T:
        """The checked request. Raises ApiError."""

    @abstractmethod
    async def work(self, fields: T, model: Model) -> Work:
        """What is to be computed. Raises ApiError."""


class PooledEndpoint(PooledTask[T]):
    """A route: a task that is answered over HTTP."""

    @abstractmethod
    def write(self, fields: T, pooled: Pooled) -> bytes:
        """The answer's JSON. May take long: it runs beside the loop."""


class PoolingService:
    """Runs requests: reads, renders, submits, answers. In any case every document ends or is aborted."""

    def __init__(
        self,
        config: GatewayConfig,
        *,
        places: GenerationService,
        session: Session,
        models: ModelRegistry,
        tokenizers: TokenizerPool,
        metrics: GatewayMetrics,
    ) -> None:
        """`places`: where every request is read and has a place while it is at work, this service's too."""
        self._places = places
        self._session = session
        self._models = models
        self._tokenizers = tokenizers
        self._metrics = metrics
        self._window = config.document_window
        self._runs: set[DocumentRun] = set()

    def cut_off(self) -> None:
        """End what still runs with an error: the server stops."""
        for run in list(self._runs):
            run.interrupt(unavailable("The server is shutting down."))

    async def serve(self, endpoint: PooledEndpoint[T], scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Raises ApiError before the answer has begun, ClientGone at any time."""
        deadline = self._places.deadline()
        with self._places.place():
            fields = endpoint.parse(await self._places.read(scope, receive), self._places.limits)
            await self.answer(endpoint, fields, scope, receive, send, deadline=deadline)

    async def answer(
        self,
        endpoint: PooledEndpoint[T],
        fields: T,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        deadline: float,
    ) -> None:
        """As `serve`, for a request that was read and has its place. Arguments as of GenerationService."""
        async with ClientWatch(receive) as watch:
            pooled = await self.run(endpoint, fields, caller_of(scope), deadline=deadline, watch=watch)
            # Thousands of vectors take long to write, and others wait for the loop.
            await send_json(send, await asyncio.to_thread(endpoint.write, fields, pooled))

    async def run(
        self,
        endpoint: PooledTask[T],
        fields: T,
        caller: Caller,
        *,
        deadline: float,
        watch: ClientWatch | None = None,
    ) -> Pooled:
        """What was computed for a request, which is counted in the metrics.

        Args:
            endpoint: what is computed.
            fields: the request, checked by `endpoint.parse`.
            deadline: the loop's time at which it is given up.
            watch: of the client's connection; None for a request without a waiting client.

        Raises:
            ApiError: it is refused, or failed.
            ClientGone: the client of `watch` hung up.
        """
        model = self._models.require(fields.model, endpoint.tasks)
        timer = RequestTimer(self._metrics, model.name)
        with timer.failures():
            return await self._pool(endpoint, fields, caller, model, timer, deadline, watch)

    async def _pool(
        self,
        endpoint: PooledTask[T],
        fields: T,
        caller: Caller,
        model: Model,
        timer: RequestTimer,
        deadline: float,
        watch: ClientWatch | None,
    ) -> Pooled:
        priority = self._places.priorities.queue_priority(caller, fields.priority)
        self._session.check(model.name, priority.priority_class, priority.tenant)
        request_id = new_id(endpoint.id_prefix)
        with span_here("render"):
            rendering = self._render(endpoint, fields, model, request_id, caller)
            work, documents = await (rendering if watch is None else watch.run(rendering))
        await caller.allowance.spend(sum(len(document.token_ids) for document in documents))
        with span_here("pool") as told:
            specs = _specs(request_id, model, work, documents, priority)
            told.update({"gen_ai.request.model": model.name, "catenary.documents": len(specs)})
            vectors = await self._vectors(specs, deadline, watch)
        pooled = Pooled(request_id, int(time.time()), model, work, documents, vectors)
        timer.accept(pooled.prompt_tokens)
        timer.finished(["stop"], usage_of(pooled.prompt_tokens, 0, None), 1)
        return pooled

    async def _vectors(
        self, specs: Sequence[common_pb2.SequenceSpec], deadline: float, watch: ClientWatch | None
    ) -> list[bytes]:
        run = DocumentRun(specs, self._session, window=self._window, deadline=deadline)
        if watch is not None:
            watch.on_gone(lambda: run.interrupt(ClientGone()))
        self._runs.add(run)
        try:
            async with run:
                return await run.vectors()
        finally:
            self._runs.discard(run)

    async def _render(
        self, endpoint: PooledTask[T], fields: T, model: Model, request_id: str, caller: Caller
    ) -> tuple[Work, list[Document]]:
        work = await endpoint.work(fields, model)
        return work, await render(work, model, self._tokenizers, request_id, caller.owner)


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
