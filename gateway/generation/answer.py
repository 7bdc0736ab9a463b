"""The two ways to answer: an event stream, or one object."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import Send

from catenary.telemetry import get_logger
from gateway.errors import ApiError, internal
from gateway.generation.generation import Generation
from gateway.generation.plan import GenerationPlan
from gateway.http.disconnect import ClientGone
from gateway.http.parts import PartSender
from gateway.streaming.delta import ChoiceDelta, ChoiceResult
from gateway.streaming.sse import SSE_DONE, SSE_HEADERS, sse_error_event
from gateway.streaming.writer import AnyWriter

_log = get_logger(__name__)
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
