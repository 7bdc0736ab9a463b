"""From a model's parts to the items of a response, and to the events that tell of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from gateway.parsing.events import Content, Part, Reasoning, ToolCallArguments, ToolCallStart
from gateway.responses import events, items
from gateway.responses.events import Event
from gateway.streaming.logprobs import ChatLogprob

NewId = Callable[[str], str]
"""A fresh id that begins with the given prefix."""


class OutputAssembler:
    """Puts one answer's items together.

    Texts of one kind that follow each other are one item, whatever pieces they came in. One item is open at a
    time; the next one closes it. `output` is right at any moment, `number` is the next sequence number."""

    def __init__(self, new_id: NewId, number: int = 0) -> None:
        self._new_id = new_id
        self.number = number
        self.output: list[items.OutputItem] = []
        self._pieces: list[str] = []
        self._logprobs: list[ChatLogprob] = []
        self._calls: dict[int, items.FunctionCall] = {}
        self._open = False

    def feed(self, parts: Iterable[Part], logprobs: Sequence[ChatLogprob] = ()) -> list[Event]:
        """Take what comes next; `logprobs` belong to the text among `parts`."""
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
        if waiting and self._open and isinstance(self.output[-1], items.ResponseMessage):
            # Tokens whose text is not complete yet.
            made += self._text("", waiting)
        return made

    def finish(self, *, cut: bool = False) -> list[Event]:
        """Nothing follows. An answer without anything is an empty message.

        `cut`: the last item is not whole.
        """
        made: list[Event] = []
        if not self.output:
            made += self._begin(self._new_message())
        return made + self._close(items.INCOMPLETE if cut else items.COMPLETED)

    def numbered(self) -> int:
        """The next sequence number, taken."""
        self.number += 1
        return self.number - 1

    @property
    def _index(self) -> int:
        return len(self.output) - 1

    def _new_message(self) -> items.ResponseMessage:
        return items.ResponseMessage(self._new_id("msg_"), "assistant", [], items.IN_PROGRESS)

    def _text(self, text: str, logprobs: list[ChatLogprob]) -> list[Event]:
        made: list[Event] = []
        if not (self._open and isinstance(self.output[-1], items.ResponseMessage)):
            made += self._begin(self._new_message())
        self._pieces.append(text)
        self._logprobs += logprobs
        item = self.output[-1]
        made.append(events.TextDelta(self.numbered(), item.id, self._index, 0, text, logprobs))
        return made

    def _reasoning(self, text: str) -> list[Event]:
        made: list[Event] = []
        if not (self._open and isinstance(self.output[-1], items.Reasoning)):
            made += self._begin(items.Reasoning(self._new_id("rs_"), status=items.IN_PROGRESS))
        self._pieces.append(text)
        item = self.output[-1]
        made.append(events.ReasoningDelta(self.numbered(), item.id, self._index, 0, text))
        return made

    def _call(self, part: ToolCallStart) -> list[Event]:
        call = items.FunctionCall(self._new_id("fc_"), part.id, part.name, status=items.IN_PROGRESS)
        self._calls[part.index] = call
        return self._begin(call)

    def _arguments(self, part: ToolCallArguments) -> list[Event]:
        self._pieces.append(part.text)
        item = self._calls[part.index]
        return [events.ArgumentsDelta(self.numbered(), item.id, self._index, part.text)]

    def _begin(self, item: items.OutputItem) -> list[Event]:
        made = self._close(items.COMPLETED)
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
        if isinstance(item, items.FunctionCall):
            item.arguments = text
            made.append(events.ArgumentsDone(self.numbered(), item.id, self._index, item.name, text))
        elif isinstance(item, items.Reasoning):
            thought = items.ReasoningText(text)
            item.content = [thought]
            made.append(events.ReasoningDone(self.numbered(), item.id, self._index, 0, text))
            made.append(events.PartDone(self.numbered(), item.id, self._index, 0, thought))
        else:
            said = items.OutputText(text, [], logprobs)
            item.content = [said]
            made.append(events.TextDone(self.numbered(), item.id, self._index, 0, text, logprobs))
            made.append(events.PartDone(self.numbered(), item.id, self._index, 0, said))
        made.append(events.ItemDone(self.numbered(), self._index, item))
        return made


def _part_of(item: items.OutputItem) -> items.OutputText | items.ReasoningText | None:
    if isinstance(item, items.ResponseMessage):
        return items.OutputText()
    return items.ReasoningText() if isinstance(item, items.Reasoning) else None


def _copy(item: items.OutputItem) -> items.OutputItem:
    # Events are written later than they are made, and the item fills up meanwhile.
    if isinstance(item, items.ResponseMessage):
        return items.ResponseMessage(item.id, item.role, [], item.status)
    if isinstance(item, items.Reasoning):
        return items.Reasoning(item.id, status=item.status)
    return items.FunctionCall(item.id, item.call_id, item.name, status=item.status)
