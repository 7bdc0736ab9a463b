"""Answers of prepared requests: plan, run, and write an event stream or one object."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace

from starlette.types import Send

from catenary.telemetry import SpanNotes, current_traceparent, get_logger, span_here
from catenary.v1 import tokenizer_pb2
from gateway.auth import Allowance
from gateway.config import GatewayConfig
from gateway.errors import ApiError, context_length_exceeded, internal
from gateway.generation.chat import fitted
from gateway.generation.generation import Generation
from gateway.generation.plan import GenerationPlan, Prepared, make_plan, truncation
from gateway.generation.requests import ActiveRequest, Requests
from gateway.http.answers import Call, PartSender, part_sender, send_json
from gateway.http.request import ClientGone
from gateway.link.inbox import Session
from gateway.metrics import RequestTimer
from gateway.streaming.answers import SSE_DONE, SSE_HEADERS, AnswerHead, AnyWriter, sse_error_event
from gateway.streaming.delta import ChoiceDelta, ChoiceResult
from gateway.text.pool import TokenizerPool
from gateway.text.target import Rendered

_log = get_logger(__name__)


LONG_ECHO = 1000
"""Entries of one event (an echoed prompt has many) that take so long to write that other tasks get a turn
before."""


async def collect(generation: Generation) -> list[ChoiceResult]:
    """Return all choices of a submitted generation; if there are more candidates than choices, those with the
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
    """Send the deltas of a submitted generation as server-sent events. An error is an event, followed by
    [DONE].

    Args:
        send: of the request.
        parts: sends the bytes after the head.
        generation: source of the deltas.
        writer: their encoder.
        on_error: called with the code of an error that only the stream can report.
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
    """Generation that was submitted to an engine."""

    generation: Generation
    timer: RequestTimer

    async def begin(self) -> None:
        """Wait for the engine's first answer. Raises ApiError, or ClientGone."""
        await self.generation.begin()
        self.timer.accept(self.generation.plan.prompt_tokens)


class GenerationService:
    """Planning and running of requests. In any case every sequence ends or is aborted."""

    def __init__(
        self, config: GatewayConfig, requests: Requests, *, session: Session, tokenizers: TokenizerPool
    ) -> None:
        self._max_unread_tokens = config.stream_buffer_tokens
        self._open_objects = config.open_objects
        self._session = session
        self._tokenizers = tokenizers
        self.requests = requests

    async def plan(self, prepared: Prepared, request: ActiveRequest) -> GenerationPlan:
        """Render a request and make all checks that need no engine.

        Raises:
            ApiError: it is refused, or no tokenizer service answers.
            ClientGone: the client hung up.
        """
        return await request.until_gone(self._plan(prepared, request))

    async def _plan(self, prepared: Prepared, request: ActiveRequest) -> GenerationPlan:
        limits, wanted = self.requests.limits, prepared.wanted
        if wanted is not None:
            if self._open_objects:
                wanted = wanted.opened()
                prepared = replace(prepared, wanted=wanted)
            await wanted.check(prepared.model.name, self._tokenizers, limits, prepared.caller.owner)
        with span_here("render"):
            rendered = await self._render(prepared)
        return make_plan(
            prepared,
            rendered,
            priority=request.priority,
            max_scored_prompt_tokens=limits.max_scored_prompt_tokens,
        )

    async def _render(self, prepared: Prepared) -> Rendered:
        prompt, model = prepared.prompt, prepared.model
        if not isinstance(prompt, tokenizer_pb2.ChatInput | tokenizer_pb2.CompletionInput):
            return Rendered.of_ids(prompt)
        keep = truncation(prepared.fields, model.max_model_len)
        request = tokenizer_pb2.RenderRequest(
            request_id=prepared.request_id,
            model=model.name,
            tenant=prepared.caller.owner,
            max_prompt_tokens=model.max_model_len if keep is None else None,
            truncate_to=keep,
        )
        if isinstance(prompt, tokenizer_pb2.CompletionInput):
            request.completion.CopyFrom(prompt)
            return await self._tokenizers.render(request)
        request.chat.CopyFrom(prompt)
        if not prepared.drops_turns:
            return await self._tokenizers.render(request)
        wanted = prepared.fields.token_limit or 1

        async def render(messages: Sequence[tokenizer_pb2.ChatMessage]) -> Rendered:
            del request.chat.messages[:]
            request.chat.messages.extend(messages)
            rendered = await self._tokenizers.render(request)
            (ids,) = rendered.prompts
            if len(ids) + wanted > model.max_model_len:
                raise context_length_exceeded(model.max_model_len, len(ids), wanted, prepared.prompt_param)
            return rendered

        return await fitted(prompt.messages, render)

    @asynccontextmanager
    async def run(self, plan: GenerationPlan, request: ActiveRequest) -> AsyncIterator[Running]:
        """Submit an admitted request, for whose first answer `Running.begin` waits; abort the rest on exit.
        It is counted in the metrics.

        Raises:
            ApiError: it is refused, or failed; also at `begin` and `generation.next`.
            ClientGone: the client hung up; also at those.
        """
        timer, allowance = request.timer, request.caller.allowance
        await allowance.spend(plan.prompt_tokens)
        with span_here("generate") as told:
            generation = Generation(
                plan,
                self._session,
                max_unread_tokens=self._max_unread_tokens,
                deadline=request.deadline,
                on_tokens=timer.tokens,
            )
            with request.interrupting(generation), _counted(generation, timer, allowance, told):
                async with generation:
                    await generation.submit(current_traceparent())
                    yield Running(generation, timer)


@contextmanager
def _counted(
    generation: Generation, timer: RequestTimer, allowance: Allowance, told: SpanNotes
) -> Iterator[None]:
    left = failed = False
    try:
        yield
    except ClientGone:
        left = True
        raise
    except Exception:
        failed = True
        raise
    finally:
        plan, usage = generation.plan, generation.usage()
        allowance.charge(usage.completion_tokens)
        ending = "error" if failed or timer.told_error else "abort"
        reasons = [reason or ending for reason in generation.finish_reasons]
        if timer.accepted or left:
            timer.finished(reasons, usage, plan.count)
        told["gen_ai.request.model"] = plan.model.asked
        told["gen_ai.response.id"] = plan.request_id
        told["gen_ai.usage.input_tokens"] = usage.prompt_tokens
        told["gen_ai.usage.output_tokens"] = usage.completion_tokens
        told["gen_ai.response.finish_reasons"] = reasons


async def answer(running: Running, kind: type[AnyWriter], call: Call) -> None:
    """Write the answer, as a stream or one object.

    Raises ApiError before it has begun, ClientGone at any time."""
    generation = running.generation
    # Made while the engine computes.
    writer = kind(answer_head(generation.plan))
    writer.ready()
    parts = part_sender(call.scope, call.send)
    await running.begin()
    if generation.plan.fields.stream:
        await send_stream(call.send, parts, generation, writer, on_error=running.timer.failed)
    else:
        results = await collect(generation)
        await send_json(call.send, await _encode(writer, results, generation))


def answer_head(plan: GenerationPlan) -> AnswerHead:
    """Return the first fields of all chunks of a request's answer."""
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
