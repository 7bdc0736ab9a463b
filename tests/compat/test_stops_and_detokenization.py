"""Users' bug reports, section A: stop strings and detokenisation."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.answers import chunks_of, joined
from tests.support.gateway import CHAT, COMPLETIONS, saying, script
from tests.support.stack_fixtures import StartStack
from tests.support.tiny_tokenizer import THINK_ID, byte_id, byte_ids

# One token a step and a pause in between: every token travels alone.
SLOW: dict[str, Any] = {"step_delay_ms": 15}
BOTH = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])


def body(path: str, **fields: Any) -> dict[str, Any]:
    prompt = {"prompt": "ABC"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "ABC"}]}
    return {"max_tokens": 64, "temperature": 0, **prompt, **fields}


@BOTH
async def test_c01_no_part_of_a_stop_string_reaches_the_client(start_stack: StartStack, path: str) -> None:
    stack = await start_stack(script(saying("DEFGHIJK"), **SLOW))
    stream = await stack.post(path, body(path, stop=["DEFGHIJ"], stream=True))
    assert joined(stream) == ("", "stop")
    assert [text for text in chunks_of(stream) if text] == []
    assert joined(await stack.post(path, body(path, stop=["DEFGHIJ"]))) == ("", "stop")


@BOTH
async def test_c02_no_empty_chunks_because_of_stop(start_stack: StartStack, path: str) -> None:
    stack = await start_stack(script(saying("hello"), **SLOW))
    texts = chunks_of(await stack.post(path, body(path, stop=["ZZZZ"], stream=True)))
    opening = 1 if path == CHAT else 0
    assert texts[:opening] == [""] * opening
    assert texts[opening:-1] == list("hello")


async def test_c03_markers_are_not_cut_by_holding_back(start_stack: StartStack) -> None:
    tokens = [THINK_ID, *byte_ids("x"), THINK_ID + 1, *byte_ids("y")]
    stack = await start_stack(script(saying(tokens), **SLOW))
    for stop in (None, ["b,c"]):
        texts = chunks_of(await stack.post(CHAT, body(CHAT, stop=stop, stream=True)))
        assert texts[1:-1] == ["<think>", "x", "</think>", "y"]


@BOTH
@pytest.mark.parametrize("stream", [False, True])
async def test_c04_stop_in_all_its_forms(start_stack: StartStack, path: str, stream: bool) -> None:
    stack = await start_stack(script(saying([*byte_ids("ab"), *byte_ids("STOP"), *byte_ids("c")])))
    for stop in ("STOP", ["STOP"], ["zz", "STOP", "yy", "xx"]):
        assert joined(await stack.post(path, body(path, stop=stop, stream=stream))) == ("ab", "stop")
    # An empty one asks for nothing.
    neutral: list[Any] = [[], None, "", [""]]
    for stop in neutral:
        assert joined(await stack.post(path, body(path, stop=stop, stream=stream))) == ("abSTOPc", "stop")
    wrong: list[Any] = [["a"] * 5, ["a", 5], 5]
    for stop in wrong:
        answer = await stack.post(path, body(path, stop=stop, stream=stream))
        assert (answer.status, answer.json()["error"]["param"].split(".")[0]) == (400, "stop")


@BOTH
async def test_c05_characters_over_several_tokens(start_stack: StartStack, path: str) -> None:
    text = "A 世界🌶️é"
    stack = await start_stack(script(saying(text), **SLOW))
    stream = await stack.post(path, body(path, stream=True))
    assert joined(stream) == (text, "stop")
    assert "\ufffd" not in stream.body.decode("utf-8", "strict")
    assert joined(await stack.post(path, body(path))) == (text, "stop")


@pytest.mark.parametrize("stream", [False, True])
async def test_c06_the_prompt_never_leaks(start_stack: StartStack, stream: bool) -> None:
    pepper = [byte_id(byte) for byte in "🌶".encode()]
    prompt = [*byte_ids("Hello world "), *pepper[:2]]
    stack = await start_stack(script(saying(pepper[2:], prompt)))
    fields = {"prompt": prompt, "stream": stream}
    assert joined(await stack.post(COMPLETIONS, {**fields, "max_tokens": 2})) == ("🌶", "length")
    assert joined(await stack.post(COMPLETIONS, {**fields, "max_tokens": 1})) == ("\ufffd", "length")


@pytest.mark.parametrize("stream", [False, True])
@BOTH
async def test_c07_an_end_inside_a_character(start_stack: StartStack, path: str, stream: bool) -> None:
    stack = await start_stack(script(saying(byte_ids("😀")[:3], then="hash")))
    options = {"stream_options": {"include_usage": True}} if stream else {}
    answer = await stack.post(path, body(path, max_tokens=3, stream=stream, **options))
    assert joined(answer) == ("\ufffd", "length")
    usage = answer.events[-2]["usage"] if stream else answer.json()["usage"]
    assert usage["completion_tokens"] == 3
