"""The two ways to answer: an event stream, or one object."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import Send

from catenary.telemetry import get_logger
from gateway.errors import ApiError, internal
from gateway.generation.generation import Generation
from gateway.http.disconnect import ClientGone
from gateway.streaming.delta import ChoiceResult
from gateway.streaming.sequence_text import LogprobEntry
from gateway.streaming.sse import DONE, HEADERS, error_event
from gateway.streaming.writer import AnyWriter

_log = get_logger(__name__)


async def collect(generation: Generation) -> list[ChoiceResult]:
    """All choices of a generation that was started, whole."""
    count = generation.plan.count
    texts: list[list[str]] = [[] for _ in range(count)]
    entries: list[list[LogprobEntry]] = [[] for _ in range(count)]
    while not generation.done:
        for delta in await generation.next():
            texts[delta.index].append(delta.text)
            entries[delta.index] += delta.entries
    wanted = generation.plan.top_count is not None
    return [
        ChoiceResult(
            index, "".join(texts[index]), tuple(entries[index]) if wanted else None, reason or "stop"
        )
        for index, reason in enumerate(generation.finish_reasons)
    ]


async def send_stream(
    send: Send,
    generation: Generation,
    writer: AnyWriter,
    *,
    on_error: Callable[[str], None],
) -> None:
    """Send the deltas of a generation that was started as server-sent events. An error is an event, followed
    by [DONE].

    Args:
        send: of the request.
        generation: what yields the deltas.
        writer: how they are written.
        on_error: called with the code of an error that only the stream could tell.
    """
    await send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
    try:
        await _send_deltas(send, generation, writer)
    except ClientGone:
        raise
    except Exception as failure:
        if isinstance(failure, ApiError):
            error = failure
        else:
            _log.exception("stream failed")
            error = internal()
        on_error(error.code or "")
        await _send_part(send, error_event(error) + DONE)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_deltas(send: Send, generation: Generation, writer: AnyWriter) -> None:
    fields = generation.plan.fields
    running = generation.usage if fields.wants_running_usage else lambda: None
    data = writer.opening(generation.plan.count, running())
    while not generation.done:
        for delta in await generation.next():
            data += writer.delta(delta, running())
        if data and not generation.done:
            await _send_part(send, data)
            data = b""
    if fields.wants_usage:
        data += writer.usage(generation.usage())
    await _send_part(send, data + DONE)


async def _send_part(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})
