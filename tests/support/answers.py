"""Reading answers of both routes, streamed or whole, in one way."""

from __future__ import annotations

from typing import Any

from tests.support.http import Answer


def _text(choice: dict[str, Any]) -> str:
    if "text" in choice:
        return str(choice["text"])
    return str((choice.get("delta") or choice.get("message") or {}).get("content") or "")


def choices_of(answer: Answer) -> list[dict[str, Any]]:
    """All choices, of all events of a stream."""
    assert answer.status == 200, answer.body
    if answer.headers["content-type"] == "application/json":
        return list(answer.json()["choices"])
    events = answer.events
    assert events[-1] == "[DONE]"
    assert events.count("[DONE]") == 1
    return [choice for event in events[:-1] for choice in event["choices"]]


def chunks_of(answer: Answer, index: int = 0) -> list[str]:
    """The text of each chunk of a choice."""
    return [_text(choice) for choice in choices_of(answer) if choice["index"] == index]


def joined(answer: Answer, index: int = 0) -> tuple[str, str]:
    """The text of a choice and its one finish reason."""
    mine = [choice for choice in choices_of(answer) if choice["index"] == index]
    reasons = [choice["finish_reason"] for choice in mine if choice["finish_reason"] is not None]
    assert len(reasons) == 1
    assert mine[-1]["finish_reason"] == reasons[0]
    return "".join(_text(choice) for choice in mine), reasons[0]
