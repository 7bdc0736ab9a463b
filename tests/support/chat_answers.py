"""Chat answers, streamed and whole, as one and the same message."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.support.http import Answer


@dataclass
class Told:
    """What a choice says. `arguments` and names stand by the call's index."""

    content: str = ""
    reasoning: str = ""
    names: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    finish_reason: str | None = None


def told(answer: Answer, index: int = 0) -> Told:
    """What a choice of an answer says; its shape is checked on the way."""
    assert answer.status == 200, answer.body
    if answer.headers["content-type"] == "application/json":
        (choice,) = (choice for choice in answer.json()["choices"] if choice["index"] == index)
        return _whole(choice)
    return _streamed(answer.events, index)


def _whole(choice: dict[str, Any]) -> Told:
    message = choice["message"]
    assert message["role"] == "assistant"
    calls = message.get("tool_calls", [])
    reasoning = message.get("reasoning_content", "")
    assert message.get("reasoning", "") == reasoning
    if calls or reasoning:
        assert message["content"] != ""
    assert all(call["type"] == "function" for call in calls)
    return Told(
        message["content"] or "",
        reasoning,
        [call["function"]["name"] for call in calls],
        [call["function"]["arguments"] for call in calls],
        [call["id"] for call in calls],
        choice["finish_reason"],
    )


def _streamed(events: list[Any], index: int) -> Told:
    assert events[-1] == "[DONE]"
    mine = [choice for event in events[:-1] for choice in event["choices"] if choice["index"] == index]
    assert mine[0]["delta"] == {"role": "assistant", "content": ""}
    assert mine[-1]["delta"] == {}
    result = Told(finish_reason=mine[-1]["finish_reason"])
    for choice in mine[1:-1]:
        delta = choice["delta"]
        assert choice["finish_reason"] is None
        assert "role" not in delta
        assert delta.get("reasoning") == delta.get("reasoning_content")
        result.content += delta.get("content", "")
        result.reasoning += delta.get("reasoning_content", "")
        for call in delta.get("tool_calls", []):
            _add(result, call)
    return result


def _add(result: Told, call: dict[str, Any]) -> None:
    if "id" in call:
        assert call["index"] == len(result.names)
        assert (call["type"], call["function"]["arguments"]) == ("function", "")
        result.ids.append(call["id"])
        result.names.append(call["function"]["name"])
        result.arguments.append("")
    else:
        assert call.keys() == {"index", "function"}
        assert call["function"].keys() == {"arguments"}
        result.arguments[call["index"]] += call["function"]["arguments"]
