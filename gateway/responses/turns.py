"""A conversation's items as the messages of a chat."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from gateway.responses import items


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a message of a chat came from."""

    item: str
    """The field of the (last) item that it was made from."""
    calls: tuple[str, ...] = ()
    """That of each of its calls."""


class _Turn:
    """What a model put out in one go: its reasoning, its text and its calls are one message of a chat."""

    def __init__(self) -> None:
        self._origin = ""
        self._call_origins: list[str] = []
        self._reasoning: list[str] = []
        self._texts: list[str] | None = None
        self._calls: list[dict[str, Any]] = []

    def takes(self, item: items.OutputItem) -> bool:
        """Whether `item` goes on with it, in the order in which models put things out."""
        if isinstance(item, items.Reasoning):
            return self._texts is None and not self._calls
        return isinstance(item, items.FunctionCall) or (self._texts is None and not self._calls)

    def add(self, item: items.OutputItem, origin: str) -> None:
        """Take an item."""
        self._origin = origin
        if isinstance(item, items.Reasoning):
            self._reasoning += [part.text for part in item.content]
        elif isinstance(item, items.FunctionCall):
            function = {"name": item.name, "arguments": item.arguments}
            self._calls.append({"id": item.call_id, "type": "function", "function": function})
            self._call_origins.append(origin)
        else:
            self._texts = [part.text for part in item.content]

    @property
    def origin(self) -> Origin:
        """Where the message comes from."""
        return Origin(self._origin, tuple(self._call_origins))

    def message(self) -> dict[str, Any]:
        """The message."""
        content = "".join(self._texts) if self._texts is not None else None
        made: dict[str, Any] = {"role": "assistant", "content": content}
        if content is None and not self._calls:
            made["content"] = ""
        if self._reasoning:
            made["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            made["tool_calls"] = self._calls
        return made


def chat_messages(conversation: Iterable[tuple[items.Item, str]]) -> Iterator[tuple[dict[str, Any], Origin]]:
    """The messages of a chat, each with its origin.

    Args:
        conversation: items, and where each came from.
    """
    turn: _Turn | None = None
    for item, origin in conversation:
        if isinstance(item, items.FunctionCallOutput) or (
            isinstance(item, items.ResponseMessage) and item.role != "assistant"
        ):
            if turn is not None:
                yield turn.message(), turn.origin
                turn = None
            yield _message(item), Origin(origin)
            continue
        if turn is not None and not turn.takes(item):
            yield turn.message(), turn.origin
            turn = None
        turn = turn or _Turn()
        turn.add(item, origin)
    if turn is not None:
        yield turn.message(), turn.origin


def _message(item: items.ResponseMessage | items.FunctionCallOutput) -> dict[str, Any]:
    if isinstance(item, items.ResponseMessage):
        return {"role": item.role, "content": _content([part.text for part in item.content])}
    texts = [item.output] if isinstance(item.output, str) else [part.text for part in item.output]
    return {"role": "tool", "tool_call_id": item.call_id, "content": _content(texts)}


def _content(texts: list[str]) -> Any:
    if len(texts) == 1:
        return texts[0]
    return [{"type": "text", "text": text} for text in texts] or ""
