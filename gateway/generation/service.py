"""From an HTTP request to its answer, an event stream or one object, for every generating route."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from catenary.telemetry import SpanNotes, current_traceparent, get_logger, new_id, span_here
from gateway.auth import Caller, caller_of, salted
from gateway.config import GatewayConfig
from gateway.constraints import Wanted, wanted_of
from gateway.errors import ApiError, bad_request, internal, overloaded, unavailable
from gateway.generation.generation import Generation
from gateway.generation.plan import GenerationPlan, Priorities, QueuePriority, make_plan, truncation
from gateway.http.answers import PartSender, part_sender, send_json
from gateway.http.body import BodyLimits, read_json_object
from gateway.http.disconnect import ClientGone, ClientWatch
from gateway.link.inbox import Session
from gateway.metrics import GatewayMetrics, RequestTimer
from gateway.parsing.choice import ParserChoice
from gateway.schemas.base import RequestLimits
from gateway.schemas.generation import GenerationFields
from gateway.streaming.delta import ChoiceDelta, ChoiceResult
from gateway.streaming.writer import SSE_DONE, SSE_HEADERS, AnswerHead, AnyWriter, sse_error_event
from gateway.text.models import Model, ModelRegistry
from gateway.text.pool import TokenizerPool
from gateway.text.target import Rendered

T = TypeVar("T", bound=GenerationFields)
_log = get_logger(__name__)


class Endpoint(ABC, Generic[T]):
    """A route: how its requests are read, rendered and answered."""

    id_prefix: ClassVar[str]
    """What ids of its answers begin with."""
    prompt_param: ClassVar[str]
    """The field that the prompt comes from."""
    default_max_tokens: ClassVar[int | None] = None
    """Tokens for a request without a limit; None: to the end of the context."""
    scores_stop_token: ClassVar[bool] = False
    """Whether a stop token that is not shown has a log probability in the answer."""
    writer: ClassVar[type[AnyWriter]]
    """What writes its answers."""

    @abstractmethod
    def parse(self, body: dict[str, Any], limits: RequestLimits) -> T:
        """The checked request. Raises ApiError."""

    def constraint(self, fields: T, model: Model) -> Wanted | None:
        """What the answer is constrained to; None: any text. Raises ApiError."""
        return wanted_of(fields)

    def parsing(self, fields: T, model: Model) -> ParserChoice:
        """What is read in the texts of the answer: nothing. Raises ApiError."""
        return ParserChoice()

    @abstractmethod
    async def render(
        self, fields: T, model: Model, pool: TokenizerPool, request_id: str, caller: Caller
    ) -> Rendered:
        """The request's prompts. Raises ApiError."""


LONG_ECHO = 1000
"""Entries of one event, as an echoed prompt has them, that take long enough to write for others to notice."""


async def collect(generation: Generation) -> list[ChoiceResult]:
    """The choices of a generation that was started, whole; of more candidates than choices the ones with the
    highest log probability per token."""
    plan = generation.plan
    parts: list[list[ChoiceDelta]] = [[] for _ in range(plan.count)]
    while not generation.done:
        for delta in await generation.next():
            parts[delta.index].append(delta)
    kept = list(range(plan.count))
    if plan.ranks:
        scores = [choice.mean_logprob for choice in generation.choices]
        ranked = sorted(kept, key=lambda index: (index // plan.candidates, -scores[index]))
        kept = [index for place, index in enumerate(ranked) if place % plan.candidates < plan.n]
    return [_joined(plan, place, parts[index]) for place, index in enumerate(kept)]


def _joined(plan: GenerationPlan, index: int, deltas: list[ChoiceDelta]) -> ChoiceResult:
    scored = plan.top_count is not None
    wants_ids = plan.fields.return_token_ids
    return ChoiceResult(
        index,
        "".join(delta.text for delta in deltas),
        tuple(entry for delta in deltas for entry in delta.entries) if scored else None,
        deltas[-1].finish_reason or "stop",
        deltas[-1].stop_reason,
        [token_id for delta in deltas for token_id in delta.token_ids] if wants_ids else None,
        deltas[0].prompt,
        [part for delta in deltas for part in delta.parts or ()] if plan.parsing.needed else None,
    )


async def send_stream(
    send: Send,
    parts: PartSender,
    generation: Generation,
    writer: AnyWriter,
    *,
    on_error: Callable[[str], None],
) -> None:
    """Send the deltas of a generation that was started as server-sent events. An error is an event, followed
    by [DONE].

    Args:
        send: of the request.
        parts: sends what follows the head.
        generation: what yields the deltas.
        writer: how they are written.
        on_error: called with the code of an error that only the stream could tell.
    """
    await send({"type": "http.response.start", "status": 200, "headers": list(SSE_HEADERS)})
    try:
        await _send_deltas(parts, generation, writer)
    except ClientGone:
        raise
    except Exception as failure:
        if isinstance(failure, ApiError):
            error = failure
        else:
            _log.exception("stream failed")
            error = internal()
        on_error(error.code or "")
        await parts(sse_error_event(error) + SSE_DONE)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_deltas(parts: PartSender, generation: Generation, writer: AnyWriter) -> None:
    fields = generation.plan.fields
    running = generation.usage if fields.wants_running_usage else None
    data = writer.opening(generation.plan.count, None if running is None else running())
    while not generation.done:
        for delta in await generation.next():
            usage = None if running is None else running()
            if len(delta.entries) > LONG_ECHO:
                data += await asyncio.to_thread(writer.delta, delta, usage)
            else:
                data += writer.delta(delta, usage)
        if data and not generation.done:
            await parts(data)
            data = b""
    if fields.wants_usage:
        data += writer.usage(generation.usage())
    await parts(data + SSE_DONE)


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
        models: ModelRegistry,
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
            self.run(endpoint, fields, caller_of(scope), deadline=deadline, watch=watch) as running,
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
        self, endpoint: Endpoint[T], fields: T, caller: Caller, *, watch: ClientWatch | None = None
    ) -> tuple[GenerationPlan, Rendered]:
        """What a request would send, with all checks that need no engine.

        Args:
            endpoint: how the request is rendered.
            fields: the request, checked by `endpoint.parse`.
            caller: for whom it is.
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
            check = wanted.check(model.name, self._tokenizers, self.limits, caller.owner)
            await (check if watch is None else watch.run(check))
        with span_here("render"):
            render = endpoint.render(fields, model, self._tokenizers, request_id, caller)
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
            cache_salt=salted(caller.cache_salt, fields.cache_salt),
            constraint=None if wanted is None else wanted.message(_thoughts_end(parsing, rendered)),
            constraint_param=None if wanted is None else wanted.param,
            priority=self._queue_priority(fields, caller),
            max_scored_prompt_tokens=self.limits.max_scored_prompt_tokens,
            parsing=parsing,
            tails=rendered.text_tails,
        )
        return plan, rendered

    def _queue_priority(self, fields: GenerationFields, caller: Caller) -> QueuePriority:
        return self.priorities.queue_priority(
            caller, fields.priority, fields.service_tier, fields.prompt_cache_key or fields.user
        )

    def deadline(self) -> float:
        """The loop's time at which a request that begins now is given up."""
        return asyncio.get_running_loop().time() + self._config.request_timeout_s

    @asynccontextmanager
    async def run(
        self,
        endpoint: Endpoint[T],
        fields: T,
        caller: Caller,
        *,
        deadline: float,
        watch: ClientWatch | None = None,
    ) -> AsyncIterator[Running]:
        """Generate for a request: entered once it is on its way to an engine, for whose first answer `begin`
        waits; what has not ended when it is left is aborted. It is counted in the metrics.

        Args:
            endpoint: how the request is rendered.
            fields: the request, checked by `endpoint.parse`.
            caller: for whom it is.
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
            priority = self._queue_priority(fields, caller)
            self._session.check(name, priority.priority_class, priority.tenant)
            plan, rendered = await self.prepare(endpoint, fields, caller, watch=watch)
            await caller.allowance.spend(plan.prompt_tokens)
            with (
                span_here("generate") as told,
                self._generation(
                    plan, caller, timer, deadline, told, scores_stop_token=endpoint.scores_stop_token
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
        caller: Caller,
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
            caller.allowance.charge(usage.completion_tokens)
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
