"""Running a request's chat and putting its response together, with or without its events."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence

from catenary.telemetry import get_logger, new_id
from gateway.errors import ApiError, internal
from gateway.generation.service import Running
from gateway.http.disconnect import ClientGone
from gateway.parsing.events import Content, Part
from gateway.responses import events
from gateway.responses.assembler import OutputAssembler
from gateway.responses.objects import Response, ResponseStatus
from gateway.streaming.delta import ChoiceDelta
from gateway.streaming.logprobs import ChatLogprob, TokenNames, chat_logprobs

_log = get_logger(__name__)
_CUT = "length"


class Producer:
    """Makes one response final, from the output of a running chat."""

    def __init__(self, response: Response, running: Running, number: int = 0) -> None:
        """`number`: the sequence number of the next event."""
        self._response = response
        self._running = running
        self._assembler = OutputAssembler(new_id, number)
        self._names = TokenNames(running.generation.plan.model.vocabulary)

    async def finish(self) -> None:
        """Fill in the response until it is final. Raises ApiError, or ClientGone."""
        async for _ in self._generated():
            continue

    async def stream(self, *opening: type[events.OfResponse]) -> AsyncIterator[list[bytes]]:
        """The same, yielding events as they are sent, all but the last, which is left to the caller.

        What fails here is no exception: it ends the response. `opening`: what it begins with. Raises
        ClientGone."""
        response = self._response
        yield [events.encode_event(kind(self._assembler.numbered(), response)) for kind in opening]
        try:
            async for made in self._generated():
                if made:
                    yield list(map(events.encode_event, made))
        except ClientGone:
            raise
        except Exception as failure:
            error = failure if isinstance(failure, ApiError) else internal()
            if error is not failure:
                _log.exception("response failed")
            self._running.failed(error.code or "")
            response.output = self._assembler.output
            response.fail(error, int(time.time()))

    def final_event(self) -> bytes:
        """The event that ends a stream, once the response is final."""
        return final_event(self._response, self._assembler.numbered())

    async def _generated(self) -> AsyncIterator[list[events.Event]]:
        generation, assembler = self._running.generation, self._assembler
        reason, done = None, False
        while not done:
            made: list[events.Event] = []
            for delta in await generation.next():
                made += assembler.feed(_parts(delta), self._logprobs(delta))
                reason = delta.finish_reason or reason
            done = generation.done
            if done:
                made += assembler.finish(cut=reason == _CUT)
            yield made
        self._response.finish(assembler.output, generation.usage(), cut=reason == _CUT, at=int(time.time()))

    def _logprobs(self, delta: ChoiceDelta) -> list[ChatLogprob]:
        if not delta.entries:
            return []
        content = chat_logprobs(delta.entries, self._names).content
        for entry in content:
            # Here, other than in chats, null is no value of theirs.
            entry.bytes = entry.bytes or []
            for other in entry.top_logprobs:
                other.bytes = other.bytes or []
        return content


def final_event(response: Response, number: int) -> bytes:
    """The event with the sequence number `number` that ends a response's stream."""
    kinds = {ResponseStatus.FAILED: events.Failed, ResponseStatus.INCOMPLETE: events.Incomplete}
    return events.encode_event(kinds.get(response.status, events.Completed)(number, response))


def _parts(delta: ChoiceDelta) -> Sequence[Part]:
    if delta.parts is not None:
        return delta.parts
    return [Content(delta.text)] if delta.text else []
