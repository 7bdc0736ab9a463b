"""From an HTTP request to its answer, for every generating route."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from catenary.telemetry import current_traceparent, get_logger, new_id
from gateway.auth import cache_salt_of
from gateway.config import GatewayConfig
from gateway.errors import ApiError, overloaded, unavailable
from gateway.generation.answer import collect, send_stream
from gateway.generation.endpoint import Endpoint, T
from gateway.generation.generation import Generation
from gateway.generation.plan import GenerationPlan, make_plan
from gateway.http.body import BodyLimits, read_json_object
from gateway.http.disconnect import ClientGone, ClientWatch, SlowReader
from gateway.http.respond import send_json
from gateway.link import RouterSession
from gateway.metrics import GatewayMetrics, RequestTimer
from gateway.schemas import RequestLimits
from gateway.streaming.delta import ChoiceResult
from gateway.streaming.writer import AnyWriter
from gateway.text.models import ModelBoard
from gateway.text.pool import TokenizerPool

_log = get_logger(__name__)
LARGE_LOGPROBS = 5000


class GenerationService:
    """Runs requests: reads, renders, submits, answers. In any case every sequence ends or is aborted."""

    def __init__(
        self,
        config: GatewayConfig,
        *,
        session: RouterSession,
        models: ModelBoard,
        tokenizers: TokenizerPool,
        metrics: GatewayMetrics,
    ) -> None:
        self._config = config
        self._session = session
        self._models = models
        self._tokenizers = tokenizers
        self._metrics = metrics
        self._body = BodyLimits(int(config.max_body_mib * (1 << 20)), config.body_timeout_s)
        self._limits = RequestLimits(
            max_n=config.max_n,
            max_prompts=config.max_prompts,
            max_sequences=config.max_sequences,
            max_messages=config.max_messages,
            max_content_parts=config.max_content_parts,
            max_stop_length=config.max_stop_length,
            max_stop_token_ids=config.max_stop_token_ids,
        )
        self._generations: set[Generation] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._active = 0
        self.draining = False
        """No new requests are taken."""

    @property
    def active(self) -> int:
        """Requests at work, from the first byte of the body to the last of the answer."""
        return self._active

    async def drain(self, grace_s: float) -> None:
        """Take nothing new, wait for what runs, and end with an error what is left after `grace_s`."""
        self.draining = True
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            _log.warning("requests cut off by the shutdown", requests=self._active, after_s=grace_s)
            for generation in list(self._generations):
                generation.interrupt(unavailable("The server is shutting down."))

    async def serve(self, endpoint: Endpoint[T], scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Raises ApiError before the answer has begun, ClientGone at any time."""
        deadline = asyncio.get_running_loop().time() + self._config.request_timeout_s
        with self._place():
            body = await read_json_object(Request(scope, receive), self._body)
            fields = endpoint.parse(body, self._limits)
            model = self._models.require(fields.model)
            del body
            timer = RequestTimer(self._metrics, model.name)
            request_id = new_id(endpoint.id_prefix)
            try:
                async with ClientWatch(receive) as watch:
                    render = endpoint.render(fields, model, self._tokenizers, request_id)
                    prompts = await watch.run(render)
                    plan = make_plan(
                        request_id=request_id,
                        model=model,
                        prompts=prompts,
                        fields=fields,
                        default_max_tokens=endpoint.default_max_tokens,
                        param=endpoint.prompt_param,
                        cache_salt=cache_salt_of(scope),
                    )
                    writer = endpoint.writer(
                        answer_id=request_id,
                        created=int(time.time()),
                        model=model.name,
                        vocabulary=model.vocabulary,
                        with_usage=fields.wants_usage,
                    )
                    with self._generation(plan, timer, deadline) as generation:
                        watch.on_gone(lambda: generation.interrupt(ClientGone()))
                        async with generation:
                            await self._run(generation, writer, timer, send)
            except ApiError as error:
                timer.failed(error.code or "")
                raise
            except ClientGone as error:
                timer.failed("slow_reader" if isinstance(error, SlowReader) else "disconnect")
                raise

    async def _run(self, generation: Generation, writer: AnyWriter, timer: RequestTimer, send: Send) -> None:
        generation.submit(current_traceparent())
        # Nothing is sent before the engine's first answer: until then a refusal is a status, not an event.
        first = await generation.next()
        timer.accept(generation.plan.prompt_tokens)
        if generation.plan.fields.stream:
            await send_stream(send, generation, writer, first, on_error=timer.failed)
        else:
            results = await collect(generation, first)
            await send_json(send, await _encode(writer, results, generation))

    @contextmanager
    def _generation(self, plan: GenerationPlan, timer: RequestTimer, deadline: float) -> Iterator[Generation]:
        generation = Generation(
            plan,
            self._session,
            max_unread_tokens=self._config.stream_buffer_tokens,
            deadline=deadline,
            on_tokens=timer.tokens,
        )
        self._generations.add(generation)
        left = False
        try:
            yield generation
        except ClientGone:
            left = True
            raise
        finally:
            self._generations.discard(generation)
            if timer.accepted or left:
                timer.finished(generation.finish_reasons, generation.usage(), plan.count)

    @contextmanager
    def _place(self) -> Iterator[None]:
        if self.draining:
            raise unavailable("The server is shutting down.")
        if self._active >= self._config.max_requests:
            raise overloaded(f"The server is working on its limit of {self._config.max_requests} requests.")
        self._active += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._active -= 1
            if not self._active:
                self._idle.set()


async def _encode(writer: AnyWriter, results: list[ChoiceResult], generation: Generation) -> bytes:
    usage = generation.usage()
    entries = sum(len(result.entries or ()) for result in results)
    if entries * ((generation.plan.top_count or 0) + 1) < LARGE_LOGPROBS:
        return writer.whole(results, usage)
    # Tens of thousands of alternatives take long to write, and others wait for the loop.
    return await asyncio.to_thread(writer.whole, results, usage)
