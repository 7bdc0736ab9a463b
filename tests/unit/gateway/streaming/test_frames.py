"""Chunks whose constant parts are encoded once are the chunks that are encoded whole."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from catenary.text import Vocabulary
from gateway.parsing.output import Content, Reasoning
from gateway.streaming.answers import (
    AnswerHead,
    ChatChunk,
    ChatWriter,
    ChunkChoice,
    Completion,
    CompletionChoice,
    CompletionWriter,
    Delta,
    sse_event,
    usage_of,
)
from gateway.streaming.delta import ChoiceDelta
from tests.support.tiny_tokenizer import tokenizer_json

VOCABULARY = Vocabulary(msgspec.json.encode(tokenizer_json()), sha256="")
texts = st.text() | st.sampled_from(['"', "\\", "\u2028\u2029\x85", "\x00", "é\n", "data: "])
names = st.text(min_size=1) | st.sampled_from(["a\u2028b", 'quote"d'])


@st.composite
def heads(draw: st.DrawFn) -> AnswerHead:
    return AnswerHead(
        "id-1",
        draw(st.integers(0, 2**31)),
        draw(names),
        VOCABULARY,
        with_usage=draw(st.booleans()),
        service_tier=draw(st.none() | st.just("flex")),
    )


def absent(head: AnswerHead) -> Any:
    return None if head.with_usage else msgspec.UNSET


def tier(head: AnswerHead) -> Any:
    return msgspec.UNSET if head.service_tier is None else head.service_tier


@given(head=heads(), deltas=st.lists(st.tuples(st.integers(0, 3), texts), max_size=5))
def test_chat(head: AnswerHead, deltas: list[tuple[int, str]]) -> None:
    writer, parsed = ChatWriter(head), ChatWriter(head)
    for index, text in deltas:
        chunk = ChatChunk(
            "id-1",
            "chat.completion.chunk",
            head.created,
            head.model,
            [ChunkChoice(index, Delta(content=text))],
            absent(head),
            tier(head),
        )
        assert writer.delta(ChoiceDelta(index, text), None) == (sse_event(chunk) if text else b"")
        # What a parser has read may be an empty text.
        part = ChoiceDelta(index, "", parts=[Content(text)])
        assert parsed.delta(part, None) == sse_event(chunk)


@given(head=heads(), deltas=st.lists(st.tuples(st.integers(0, 3), texts), max_size=5))
def test_completion(head: AnswerHead, deltas: list[tuple[int, str]]) -> None:
    writer = CompletionWriter(head)
    for index, text in deltas:
        chunk = Completion(
            "id-1",
            "text_completion",
            head.created,
            head.model,
            [CompletionChoice(index, text)],
            absent(head),
            tier(head),
        )
        assert writer.delta(ChoiceDelta(index, text), None) == (sse_event(chunk) if text else b"")


@pytest.mark.parametrize(
    "told",
    [
        ChoiceDelta(0, "a", token_ids=(5,)),
        ChoiceDelta(0, "a", finish_reason="stop"),
        ChoiceDelta(0, "", parts=[Reasoning("a")]),
        ChoiceDelta(0, "", parts=[Content("a"), Content("b")]),
    ],
)
def test_what_is_more_than_text_is_all_told(told: ChoiceDelta) -> None:
    head = AnswerHead("id-1", 1, "m", VOCABULARY)
    writer = ChatWriter(head)
    writer.delta(ChoiceDelta(0, "first"), None)
    choices = [
        msgspec.json.decode(line.removeprefix(b"data: "))["choices"][0]
        for line in writer.delta(told, None).strip().split(b"\n\n")
    ]
    assert choices[0].get("token_ids", []) == list(told.token_ids)
    assert choices[-1]["finish_reason"] == told.finish_reason
    said = [choice["delta"].get("content", choice["delta"].get("reasoning", "")) for choice in choices]
    parts: list[Any] = list(told.parts or ())
    assert "".join(said) == "".join(part.text for part in parts) + told.text


def test_running_usage_is_in_each_chunk() -> None:
    writer = ChatWriter(AnswerHead("id-1", 1, "m", VOCABULARY, with_usage=True))
    for count in (1, 2):
        data = writer.delta(ChoiceDelta(0, "a"), usage_of(3, count))
        assert msgspec.json.decode(data.removeprefix(b"data: "))["usage"]["completion_tokens"] == count
