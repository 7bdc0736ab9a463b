"""Which turns of a chat are left out where it does not fit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import ApiError, context_length_exceeded
from gateway.generation.chat import droppable, fitted
from gateway.schemas.chat import ChatMessage
from gateway.text.target import Rendered


def message(role: str, text: str = "x") -> ChatMessage:
    """A message; its text tells how many tokens it has."""
    fields = {"tool_call_id": "c"} if role == "tool" else {}
    return ChatMessage.model_validate({"role": role, "content": [{"type": "text", "text": text}], **fields})


def chat(roles: str) -> list[ChatMessage]:
    names = {"s": "system", "d": "developer", "u": "user", "a": "assistant", "t": "tool"}
    return [message(names[role]) for role in roles]


@pytest.mark.parametrize(
    ("roles", "parts"),
    [
        ("u", []),
        ("su", []),
        ("suau", [[1, 2]]),
        ("uatatau", [[0, 1, 2, 3, 4, 5]]),
        ("asuadu", [[0], [2, 3]]),
        ("uu", [[0]]),
        ("uatat", [[1, 2]]),
        ("uattaat", [[1, 2, 3], [4]]),
        ("uauatatta", [[0, 1], [3, 4], [5, 6, 7]]),
        ("at", []),
        ("atat", [[0, 1]]),
        ("s", []),
        ("ut", []),
    ],
)
def test_turns_go_first_then_rounds_of_the_last_turn(roles: str, parts: list[list[int]]) -> None:
    assert droppable(chat(roles)) == parts


class Renderer:
    """Counts an `x` as a token."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.calls = 0

    async def __call__(self, messages: list[ChatMessage]) -> Rendered:
        self.calls += 1
        text = "|".join(f"{message.role}:{message.texts[0]}" for message in messages)
        if text.count("x") > self.room:
            raise context_length_exceeded(self.room, text.count("x"), 1, "input")
        return Rendered([[0] * text.count("x")], [text])


@given(
    st.lists(st.tuples(st.sampled_from("suat"), st.integers(0, 5)), min_size=1, max_size=40),
    st.integers(0, 60),
)
async def test_as_few_as_possible_are_left_out(sizes: list[tuple[str, int]], room: int) -> None:
    messages = [
        made.model_copy(update={"content": message("user", "x" * size or "-").content})
        for made, (_, size) in zip(chat("".join(role for role, _ in sizes)), sizes, strict=True)
    ]
    parts = droppable(messages)
    expected = None
    for count in range(len(parts) + 1):
        gone = {index for part in parts[:count] for index in part}
        kept = [message for index, message in enumerate(messages) if index not in gone]
        if sum(message.texts[0].count("x") for message in kept) <= room:
            expected = kept
            break
    render = Renderer(room)
    if expected is None:
        with pytest.raises(ApiError) as caught:
            await fitted(messages, render)
        total = sum(message.texts[0].count("x") for message in messages)
        assert f"({total} in the input" in caught.value.message
        assert render.calls <= 2
    else:
        assert await fitted(messages, render) == await Renderer(room)(expected)
        assert render.calls <= 2 + len(parts).bit_length()


async def test_another_error_is_told() -> None:
    async def render(messages: list[ChatMessage]) -> Rendered:
        if len(messages) == 3:
            raise context_length_exceeded(3, 4, 1, "input")
        raise ApiError(400, "no", param="messages")

    with pytest.raises(ApiError, match="no"):
        await fitted(chat("uau"), render)
