"""From an HTTP request to its answer, for every generating route."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from catenary.telemetry import SpanNotes, current_traceparent, get_logger, new_id, span_here
from gateway.auth import cache_salt_of, salted
from gateway.caller import current_caller
from gateway.config import GatewayConfig
from gateway.errors import bad_request, overloaded, unavailable
from gateway.generation.answer import collect, send_stream
from gateway.generation.endpoint import Endpoint, T
from gateway.generation.generation import Generation
from gateway.generation.plan import GenerationPlan
from gateway.generation.planning import make_plan, truncation
from gateway.generation.priorities import Priorities, Standing
from gateway.http.body import BodyLimits, read_json_object
from gateway.http.disconnect import ClientGone, ClientWatch
from gateway.http.parts import PartSender, part_sender
from gateway.http.respond import send_json
from gateway.limits.allowance import current_allowance
from gateway.link.session import Session
from gateway.metrics import GatewayMetrics, RequestTimer
from gateway.parsing.choice import ParserChoice
from gateway.schemas.generation import GenerationFields
from gateway.schemas.limits import RequestLimits
from gateway.streaming.delta import ChoiceResult
from gateway.streaming.writer import AnswerHead, AnyWriter
from gateway.text.models import ModelBoard
from gateway.text.pool import TokenizerPool
from gateway.text.rendered import Rendered

_log = get_logger(__name__)
LARGE_LOGPROBS = 5000


@dataclass(frozen=True, slots=True)
class Running:
    """A request that was sent to an engine. `failed` counts, by its code, an error that was told to the
    client in place of raising it; `accepted`, that an engine has taken it, with so many tokens."""

    generation: Generation
    rendered: Rendered
    failed: Callable[[str], None]
    accepted: Callable[[int], None]

    async def begin(self) -> None:
        """Wait until an engine has answered for the first time. Raises ApiError, or ClientGone."""
        await self.generation.begin()
        self.accepted(self.generation.plan.prompt_tokens)


class GenerationService:
    """Runs requests: reads, renders, submits, answers. In any case every sequence ends or is aborted."""

    def __init__(
        self,
        config: GatewayConfig,
        *,
        session: Session,
        models: ModelBoard,
        tokenizers: TokenizerPool,
        metrics: GatewayMetrics,
    ) -> None:
        self._config = config
        self._session = session
        self._models = models
        self._tokenizers = tokenizers
        self._metrics = metrics
        self._body = BodyLimits(
            int(config.max_body_mib * (1 << 20)), config.max_body_values, config.body_timeout_s
        )
        self.limits = RequestLimits(
            **{limit.name: getattr(config, limit.name) for limit in dataclasses.fields(RequestLimits)}
        )
        """The limits of a request."""
        self.priorities = Priorities(
            config.priority_tier,
            config.flex_tier,
            None if config.max_wait_s is None else round(config.max_wait_s * 1000),
        )
        """How requests wait for an engine."""
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
        deadline = self.deadline()
        with self.place():
            fields = endpoint.parse(await self.read(scope, receive), self.limits)
            await self.answer(endpoint, fields, scope, receive, send, deadline=deadline)

    async def answer(
        self, endpoint: Endpoint[T], fields: T, scope: Scope, receive: Receive, send: Send, *, deadline: float
    ) -> None:
        """As `serve`, for a request that was read and has its place.

        Args:
            endpoint: of the route.
            fields: the request, checked by `endpoint.parse`.
            scope: of the connection, as are `receive` and `send`.
            receive: after the body.
            send: before the head.
            deadline: the loop's time at which the request is given up."""
        async with (
            ClientWatch(receive) as watch,
            self.run(
                endpoint, fields, cache_salt=cache_salt_of(scope), deadline=deadline, watch=watch
            ) as running,
        ):
            # While the engine computes.
            writer = endpoint.writer(answer_head(running.generation.plan))
            writer.ready()
            parts = part_sender(scope, send)
            await running.begin()
            await _answer(writer, running, send, parts)

    async def read(self, scope: Scope, receive: Receive) -> dict[str, Any]:
        """A request's body, of one that asks a model: if it names none, it is the only one that is served.

        Raises ApiError, or ClientGone."""
        body = await self.read_object(scope, receive)
        if body.get("model") in (None, ""):
            body["model"] = self._models.only()
            if body["model"] is None:
                raise bad_request(
                    "Missing required parameter: 'model', as several are served.",
                    "model",
                    "missing_required_parameter",
                )
        return body

    async def read_object(self, scope: Scope, receive: Receive) -> dict[str, Any]:
        """A request's body. Raises ApiError, or ClientGone."""
        return await read_json_object(Request(scope, receive), self._body)

    async def prepare(
        self, endpoint: Endpoint[T], fields: T, *, cache_salt: str, watch: ClientWatch | None = None
    ) -> tuple[GenerationPlan, Rendered]:
        """What a request would send, with all checks that need no engine.

        Args:
            endpoint: how the request is rendered.
            fields: the request, checked by `endpoint.parse`.
            cache_salt: of the client's credentials.
            watch: of the client's connection, if a client waits.

        Raises:
            ApiError: it is refused, or nothing can serve it now.
            ClientGone: the client of `watch` hung up.
        """
        model = self._models.require(fields.model)
        request_id = new_id(endpoint.id_prefix)
        parsing = endpoint.parsing(fields, model)
        keep = truncation(fields, model.max_model_len)
        wanted = endpoint.constraint(fields, model)
        if wanted is not None:
            wanted = wanted.opened() if self._config.open_objects else wanted
            check = wanted.check(model.name, self._tokenizers, self.limits)
            await (check if watch is None else watch.run(check))
        with span_here("render"):
            render = endpoint.render(fields, model, self._tokenizers, request_id)
            rendered = await (render if watch is None else watch.run(render))
        if keep is not None:
            rendered = rendered.truncated(keep)
        plan = make_plan(
            request_id=request_id,
            model=model,
            prompts=rendered.prompts,
            fields=fields,
            default_max_tokens=endpoint.default_max_tokens,
            param=endpoint.prompt_param,
            cache_salt=salted(cache_salt, fields.cache_salt),
            constraint=None if wanted is None else wanted.message(_thoughts_end(parsing, rendered)),
            constraint_param=None if wanted is None else wanted.param,
            standing=self._standing(fields),
            max_scored_prompt_tokens=self.limits.max_scored_prompt_tokens,
            parsing=parsing,
            tails=rendered.text_tails,
        )
        return plan, rendered

    def _standing(self, fields: GenerationFields) -> Standing:
        return self.priorities.standing(
            current_caller(), fields.priority, fields.service_tier, fields.prompt_cache_key or fields.user
        )

    def deadline(self) -> float:
        """The loop's time at which a request that begins now is given up."""
        return asyncio.get_running_loop().time() + self._config.request_timeout_s

    @asynccontextmanager
    async def run(
        self,
        endpoint: Endpoint[T],
        fields: T,
        *,
        cache_salt: str,
        deadline: float,
        watch: ClientWatch | None = None,
    ) -> AsyncIterator[Running]:
        """Generate for a request: entered once it is on its way to an engine, for whose first answer `begin`
        waits; what has not ended when it is left is aborted. It is counted in the metrics.

        Args:
            endpoint: how the request is rendered.
            fields: the request, checked by `endpoint.parse`.
            cache_salt: of the client's credentials.
            deadline: the loop's time at which it is given up.
            watch: of the client's connection; None for a request without a waiting client.

        Raises:
            ApiError: it is refused, or failed; also at `begin` and `generation.next`.
            ClientGone: the client of `watch` hung up; also at those.
        """
        # An unknown model is no label of a metric.
        name = self._models.require(fields.model).name
        timer = RequestTimer(self._metrics, name)
        with timer.failures():
            standing = self._standing(fields)
            self._session.check(name, standing.priority_class, standing.tenant)
            plan, rendered = await self.prepare(endpoint, fields, cache_salt=cache_salt, watch=watch)
            await current_allowance().spend(plan.prompt_tokens)
            with (
                span_here("generate") as told,
                self._generation(
                    plan, timer, deadline, told, scores_stop_token=endpoint.scores_stop_token
                ) as generation,
            ):
                if watch is not None:
                    watch.on_gone(lambda: generation.interrupt(ClientGone()))
                async with generation:
                    await generation.submit(current_traceparent())
                    yield Running(generation, rendered, timer.failed, timer.accept)

    @contextmanager
    def _generation(
        self,
        plan: GenerationPlan,
        timer: RequestTimer,
        deadline: float,
        told: SpanNotes,
        *,
        scores_stop_token: bool,
    ) -> Iterator[Generation]:
        generation = Generation(
            plan,
            self._session,
            max_unread_tokens=self._config.stream_buffer_tokens,
            deadline=deadline,
            on_tokens=timer.tokens,
            scores_stop_token=scores_stop_token,
        )
        self._generations.add(generation)
        left = failed = False
        try:
            yield generation
        except ClientGone:
            left = True
            raise
        except Exception:
            failed = True
            raise
        finally:
            self._generations.discard(generation)
            usage = generation.usage()
            current_allowance().charge(usage.completion_tokens)
            ending = "error" if failed or timer.told_error else "abort"
            reasons = [reason or ending for reason in generation.finish_reasons]
            if timer.accepted or left:
                timer.finished(reasons, usage, plan.count)
            told["gen_ai.request.model"] = plan.model.asked
            told["gen_ai.response.id"] = plan.request_id
            told["gen_ai.usage.input_tokens"] = usage.prompt_tokens
            told["gen_ai.usage.output_tokens"] = usage.completion_tokens
            told["gen_ai.response.finish_reasons"] = reasons

    @contextmanager
    def place(self) -> Iterator[None]:
        """A place among the requests at work, which every request needs. Raises ApiError: the server is
        stopping (503), or all places are taken (429)."""
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


def _thoughts_end(parsing: ParserChoice, rendered: Rendered) -> str | None:
    """Where a constraint begins to hold: a chat may begin in thoughts."""
    return parsing.thoughts_end(rendered.text_tails[0]) if parsing.needed else None


def answer_head(plan: GenerationPlan) -> AnswerHead:
    """The first fields of all chunks of a request's answer."""
    return AnswerHead(
        answer_id=plan.request_id,
        created=int(time.time()),
        model=plan.model.asked,
        vocabulary=plan.model.vocabulary,
        tokens_as_ids=bool(plan.fields.return_tokens_as_token_ids),
        with_usage=plan.fields.wants_usage,
        service_tier=plan.fields.tier,
        legacy_calls=plan.parsing.legacy,
    )


async def _answer(writer: AnyWriter, running: Running, send: Send, parts: PartSender) -> None:
    generation = running.generation
    if generation.plan.fields.stream:
        await send_stream(send, parts, generation, writer, on_error=running.failed)
    else:
        results = await collect(generation)
        await send_json(send, await _encode(writer, results, generation))


async def _encode(writer: AnyWriter, results: list[ChoiceResult], generation: Generation) -> bytes:
    usage = generation.usage()
    plan = generation.plan
    entries = sum(len(result.entries or ()) for result in results) * ((plan.top_count or 0) + 1)
    if plan.fields.prompt_logprobs is not None:
        entries += plan.prompt_tokens * plan.candidates * (plan.fields.prompt_logprobs + 1)
    if entries < LARGE_LOGPROBS:
        return writer.whole(results, usage)
    # Tens of thousands of alternatives take long to write, and others wait for the loop.
    return await asyncio.to_thread(writer.whole, results, usage)
