"""Stop strings of the clients: what a reader shows does not depend on how tokens came together."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catenary.client import AsyncClient
from catenary.client.async_client import TextReader, stop_strings
from catenary.client.text import TextSide
from catenary.text import Vocabulary
from catenary.v1 import common_pb2, router_pb2
from tests.support.rpc_fakes import SECRETS, FakeRouter, serving
from tests.support.tiny_tokenizer import byte_ids, tokenizer_json

VOCABULARY = Vocabulary(json.dumps(tokenizer_json()).encode(), sha256="x")
TEXTS = st.text(alphabet="ab\u4e16", max_size=24)
STOPS = st.lists(st.text(alphabet="ab\u4e16", min_size=1, max_size=3), max_size=3)


def reader(stops: list[str], min_tokens: int = 0) -> TextReader:
    return TextReader(VOCABULARY.detokenizer(()), stops, min_tokens)


@given(TEXTS, STOPS, st.lists(st.integers(0, 40), max_size=6))
def test_a_text_ends_in_front_of_its_first_stop_string(text: str, stops: list[str], cuts: list[int]) -> None:
    ids = byte_ids(text)
    reading = reader(stops)
    places = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    shown = "".join(reading.push(ids[begin:end]) for begin, end in pairwise(places))
    if not reading.stopped:
        shown += reading.finish()
    found = [
        (end, -len(stop)) for stop in stops for end in range(1, len(text) + 1) if text[:end].endswith(stop)
    ]
    assert reading.stopped == bool(found)
    if not found:
        assert (shown, reading.tokens) == (text, len(ids))
        return
    end, length = min(found)
    assert shown == text[: end + length]
    assert reading.tokens == len(byte_ids(text[:end]))


def test_among_the_first_tokens_no_stop_string_is_looked_for() -> None:
    reading = reader(["a"], min_tokens=3)
    assert reading.push(byte_ids("aabba")) == "aabb"
    assert (reading.tokens, reading.stopped) == (5, True)


def test_forms_of_stop() -> None:
    assert stop_strings("ab") == ("ab",)
    assert stop_strings(["a", "b"]) == ("a", "b")
    assert stop_strings(()) == ()
    for empty in ("", ["a", ""]):
        with pytest.raises(ValueError, match="empty"):
            stop_strings(empty)


async def test_an_end_may_come_after_its_stop_token(monkeypatch: pytest.MonkeyPatch) -> None:
    async def vocabulary(_side: TextSide, _model: str) -> Vocabulary:
        return VOCABULARY

    async def answer(*_: Any) -> AsyncIterator[router_pb2.GenerateResponse]:
        yield router_pb2.GenerateResponse(token_ids=byte_ids("ab"))
        stop = common_pb2.SequenceEnd(reason=common_pb2.FINISH_REASON_STOP, stop_token_id=byte_ids("b")[0])
        yield router_pb2.GenerateResponse(end=stop)

    monkeypatch.setattr(TextSide, "vocabulary", vocabulary)
    monkeypatch.setattr(FakeRouter, "Generate", answer)
    async with serving() as running, AsyncClient(running.target, secret=SECRETS.client) as client:
        deltas = [delta async for delta in client.stream_complete([1], model="m")]
    assert ("".join(delta.text for delta in deltas), deltas[-1].finish_reason) == ("ab", "stop")
