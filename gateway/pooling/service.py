"""From an HTTP request to its answer, for every route that computes vectors or scores."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from starlette.types import Receive, Scope, Send

from catenary.telemetry import current_traceparent, new_id, span_here
from catenary.v1 import common_pb2
from gateway.caller import current_caller
from gateway.config import GatewayConfig
from gateway.errors import unavailable
from gateway.generation.priorities import Standing
from gateway.generation.service import GenerationService
from gateway.http.disconnect import ClientGone, ClientWatch
from gateway.http.respond import send_json
from gateway.limits.allowance import current_allowance
from gateway.link.session import Session
from gateway.metrics import GatewayMetrics, RequestTimer
from gateway.pooling.endpoint import PooledEndpoint, PooledTask, T
from gateway.pooling.rendering import render
from gateway.pooling.run import DocumentRun
from gateway.pooling.work import Document, Pooled, Work
from gateway.streaming.usage import usage_of
from gateway.text.models import Model, ModelBoard
from gateway.text.pool import TokenizerPool


class PoolingService:
    """Runs requests: reads, renders, submits, answers. In any case every document ends or is aborted."""

    def __init__(
        self,
        config: GatewayConfig,
        *,
        places: GenerationService,
        session: Session,
        models: ModelBoard,
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
            await self.answer(endpoint, fields, receive, send, deadline=deadline)

    async def answer(
        self, endpoint: PooledEndpoint[T], fields: T, receive: Receive, send: Send, *, deadline: float
    ) -> None:
        """As `serve`, for a request that was read and has its place. Arguments as of GenerationService."""
        async with ClientWatch(receive) as watch:
            pooled = await self.run(endpoint, fields, deadline=deadline, watch=watch)
            # Thousands of vectors take long to write, and others wait for the loop.
            await send_json(send, await asyncio.to_thread(endpoint.write, fields, pooled))

    async def run(
        self,
        endpoint: PooledTask[T],
        fields: T,
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
            return await self._pool(endpoint, fields, model, timer, deadline, watch)

    async def _pool(
        self,
        endpoint: PooledTask[T],
        fields: T,
        model: Model,
        timer: RequestTimer,
        deadline: float,
        watch: ClientWatch | None,
    ) -> Pooled:
        standing = self._places.priorities.standing(current_caller(), fields.priority)
        self._session.check(model.name, standing.priority_class, standing.tenant)
        request_id = new_id(endpoint.id_prefix)
        with span_here("render"):
            rendering = self._render(endpoint, fields, model, request_id)
            work, documents = await (rendering if watch is None else watch.run(rendering))
        await current_allowance().spend(sum(len(document.token_ids) for document in documents))
        with span_here("pool") as told:
            specs = _specs(request_id, model, work, documents, standing)
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
        self, endpoint: PooledTask[T], fields: T, model: Model, request_id: str
    ) -> tuple[Work, list[Document]]:
        work = await endpoint.work(fields, model)
        return work, await render(work, model, self._tokenizers, request_id)


def _specs(
    request_id: str, model: Model, work: Work, documents: Sequence[Document], standing: Standing
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
        standing.enter(spec)
    return specs
