"""Calls of functions and their results as calls of tools: the ids that a template may want."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.generation.chat import with_tools
from gateway.schemas.base import RequestLimits, parse_request
from gateway.schemas.chat import ChatMessage, ChatRequest

USER = {"role": "user", "content": "x"}


def call(name: str) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "function_call": {"name": name, "arguments": "{}"}}


def result(name: str, content: str | None = "r") -> dict[str, Any]:
    return {"role": "function", "name": name, "content": content}


def read(*messages: dict[str, Any]) -> list[ChatMessage]:
    return parse_request(ChatRequest, {"model": "m", "messages": [*messages]}, RequestLimits()).messages


def ids(*messages: dict[str, Any], parser: str = "hermes") -> list[str]:
    made = with_tools(read(*messages), parser)
    assert all(message.function_call is None and message.role != "function" for message in made)
    return [message.tool_call_id or message.tool_calls[0].id for message in made if message.role != "user"]  # type: ignore[index]


def test_a_chat_without_them_stays_as_it_is() -> None:
    messages = read(USER, {"role": "assistant", "content": "y"})
    assert with_tools(messages, "hermes") is messages


@pytest.mark.parametrize("parser", ["hermes", "mistral", ""])
def test_a_result_has_the_id_of_its_call(parser: str) -> None:
    chat = (USER, call("f"), result("f"), call("g"), result("f"), result("g", None), result("other"))
    first, same, second, again, its, last = ids(*chat, parser=parser)
    assert first == same == again
    assert second == its == last
    assert first != second
    # Mistral's templates want nine letters and digits.
    assert all(len(one) == 9 and one.isalnum() for one in (first, second))
    assert ids(*chat, parser=parser)[0] == first, "the same for the same chat"


def test_ids_that_are_there_are_not_used_again() -> None:
    tool = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    there = {"role": "assistant", "tool_calls": [tool]}
    assert ids(USER, there, call("f"), result("f"))[1:] == ["call00002", "call00002"]


def test_ids_of_kimi_count_on() -> None:
    assert ids(USER, call("f"), result("f"), call("f"), result("f"), parser="kimi_k2") == [
        *("functions.f:0", "functions.f:0", "functions.f:1", "functions.f:1")
    ]


def test_a_result_without_a_call() -> None:
    assert len(ids(USER, result("f"))) == 1
