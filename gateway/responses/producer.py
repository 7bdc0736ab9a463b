"""Producer of a response from the output of a running chat, with or without the events of a stream."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

from catenary.telemetry import get_logger, new_id
from gateway.errors import ApiError, internal
from gateway.generation.service import Running
from gateway.http.request import ClientGone
from gateway.parsing.output import Content, Part, Reasoning, ToolCallArguments, ToolCallStart
from gateway.responses import events, objects
from gateway.responses.events import Event
from gateway.responses.objects import Response, ResponseStatus
from gateway.streaming.delta import ChatLogprob, ChoiceDelta, TokenNames, chat_logprobs

_log = get_logger(__name__)


NewId = Callable[[str], str]


class OutputAssembler:
    """Assembler of the items of one answer.

    Adjacent texts of one kind are one item. One item is open at a time; the next one closes it. `output` is
    valid at any moment; `number` is the next sequence number."""

    def __init__(self, new_id: NewId, number: int = 0) -> None:
        self._new_id = new_id
        self.number = number
        self.output: list[objects.OutputItem] = []
        self._pieces: list[str] = []
        self._logprobs: list[ChatLogprob] = []
        self._calls: dict[int, objects.FunctionCall] = {}
        self._open = False

    def feed(self, parts: Iterable[Part], logprobs: Sequence[ChatLogprob] = ()) -> list[Event]:
        """Append parts, and return their events. `logprobs` belong to the text among `parts`."""
        made: list[Event] = []
        waiting = list(logprobs)
        for part in parts:
            if isinstance(part, Content):
                made += self._text(part.text, waiting)
                waiting = []
            elif isinstance(part, Reasoning):
                made += self._reasoning(part.text)
            elif isinstance(part, ToolCallStart):
                made += self._call(part)
            else:
                made += self._arguments(part)
        if waiting and self._open and isinstance(self.output[-1], objects.ResponseMessage):
            # Log probabilities of tokens whose text is incomplete.
            made += self._text("", waiting)
        return made

    def finish(self, *, cut: bool = False) -> list[Event]:
        """Close the last item, and return the events. An answer without items is an empty message.

        `cut`: the last item is incomplete."""
        made: list[Event] = []
        if not self.output:
            made += self._begin(self._new_message())
        return made + self._close(objects.INCOMPLETE if cut else objects.COMPLETED)

    def numbered(self) -> int:
        """Return the next sequence number, and count it up."""
        self.number += 1
        return self.number - 1

    @property
    def _index(self) -> int:
        return len(self.output) - 1

    def _new_message(self) -> objects.ResponseMessage:
        return objects.ResponseMessage(self._new_id("msg_"), "assistant", [], objects.IN_PROGRESS)

    def _text(self, text: str, logprobs: list[ChatLogprob]) -> list[Event]:
        made: list[Event] = []
        if not (self._open and isinstance(self.output[-1], objects.ResponseMessage)):
            made += self._begin(self._new_message())
        self._pieces.append(text)
        self._logprobs += logprobs
        item = self.output[-1]
        made.append(events.TextDelta(self.numbered(), item.id, self._index, 0, text, logprobs))
        return made

    def _reasoning(self, text: str) -> list[Event]:
        made: list[Event] = []
        if not (self._open and isinstance(self.output[-1], objects.Reasoning)):
            made += self._begin(objects.Reasoning(self._new_id("rs_"), status=objects.IN_PROGRESS))
        self._pieces.append(text)
        item = self.output[-1]
        made.append(events.ReasoningDelta(self.numbered(), item.id, self._index, 0, text))
        return made

    def _call(self, part: ToolCallStart) -> list[Event]:
        call = objects.FunctionCall(self._new_id("fc_"), part.id, part.name, status=objects.IN_PROGRESS)
        self._calls[part.index] = call
        return self._begin(call)

    def _arguments(self, part: ToolCallArguments) -> list[Event]:
        self._pieces.append(part.text)
        item = self._calls[part.index]
        return [events.ArgumentsDelta(self.numbered(), item.id, self._index, part.text)]

    def _begin(self, item: objects.OutputItem) -> list[Event]:
        made = self._close(objects.COMPLETED)
        self.output.append(item)
        self._open = True
        made.append(events.ItemAdded(self.numbered(), self._index, _copy(item)))
        part = _part_of(item)
        if part is not None:
            made.append(events.PartAdded(self.numbered(), item.id, self._index, 0, part))
        return made

    def _close(self, status: str) -> list[Event]:
        if not self._open:
            return []
        self._open = False
        item, text = self.output[-1], "".join(self._pieces)
        logprobs, self._pieces, self._logprobs = self._logprobs, [], []
        item.status = status
        made: list[Event] = []
        if isinstance(item, objects.FunctionCall):
            item.arguments = text
            made.append(events.ArgumentsDone(self.numbered(), item.id, self._index, item.name, text))
        elif isinstance(item, objects.Reasoning):
            thought = objects.ReasoningText(text)
            item.content = [thought]
            made.append(events.ReasoningDone(self.numbered(), item.id, self._index, 0, text))
            made.append(events.PartDone(self.numbered(), item.id, self._index, 0, thought))
        else:
            said = objects.OutputText(text, [], logprobs)
            item.content = [said]
            made.append(events.TextDone(self.numbered(), item.id, self._index, 0, text, logprobs))
            made.append(events.PartDone(self.numbered(), item.id, self._index, 0, said))
        made.append(events.ItemDone(self.numbered(), self._index, item))
        return made


def _part_of(item: objects.OutputItem) -> objects.OutputText | objects.ReasoningText | None:
    if isinstance(item, objects.ResponseMessage):
        return objects.OutputText()
    return objects.ReasoningText() if isinstance(item, objects.Reasoning) else None


def _copy(item: objects.OutputItem) -> objects.OutputItem:
    # Events are encoded later than they are made, and the item is filled in meanwhile.
    if isinstance(item, objects.ResponseMessage):
        return objects.ResponseMessage(item.id, item.role, [], item.status)
    if isinstance(item, objects.Reasoning):
        return objects.Reasoning(item.id, status=item.status)
    return objects.FunctionCall(item.id, item.call_id, item.name, status=item.status)


_CUT = "length"


class Producer:
    """Producer of one response from the output of a running chat."""

    def __init__(self, response: Response, running: Running, number: int = 0) -> None:
        """Make a producer. `number`: the sequence number of the next event."""
        self._response = response
        self._running = running
        self._assembler = OutputAssembler(new_id, number)
        self._names = TokenNames(running.generation.plan.model.vocabulary)

    async def finish(self) -> None:
        """Fill in the response until it is final. Raise ApiError, or ClientGone."""
        async for _ in self._generated():
            continue

    async def stream(self, *opening: type[events.OfResponse]) -> AsyncIterator[list[bytes]]:
        """Fill in the response, and yield its encoded events but the last, which is left to the caller.

        A failure ends the response and is no exception. `opening`: the first events. Raise ClientGone."""
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
            self._running.timer.failed(error.code or "")
            response.output = self._assembler.output
            response.fail(error, int(time.time()))

    def final_event(self) -> bytes:
        """Return the last event of the stream, once the response is final."""
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
            # Unlike in chats, null is not allowed.
            entry.bytes = entry.bytes or []
            for other in entry.top_logprobs:
                other.bytes = other.bytes or []
        return content


def final_event(response: Response, number: int) -> bytes:
    """Return the last event of a response's stream, with the sequence number `number`."""
    kinds = {ResponseStatus.FAILED: events.Failed, ResponseStatus.INCOMPLETE: events.Incomplete}
    return events.encode_event(kinds.get(response.status, events.Completed)(number, response))


def _parts(delta: ChoiceDelta) -> Sequence[Part]:
    if delta.parts is not None:
        return delta.parts
    return [Content(delta.text)] if delta.text else []
