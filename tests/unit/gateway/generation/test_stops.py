"""Stop strings are looked for in the answer alone: neither in thoughts nor in calls."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catenary.text import Vocabulary
from catenary.v1 import common_pb2
from gateway.generation.generation import Generation
from gateway.generation.plan import Prepared, make_plan
from gateway.generation.service import collect
from gateway.link.inbox import SequenceEnded
from gateway.parsing.choice import ParserChoice
from gateway.parsing.output import Content, Reasoning, ToolCallArguments, ToolCallStart
from gateway.parsing.toolset import ToolSet
from gateway.schemas.base import RequestLimits, parse_request
from gateway.schemas.chat import ChatRequest
from gateway.streaming.delta import ChoiceResult, TokenLogprob
from gateway.text.models import Model
from gateway.text.target import Rendered
from tests.support.parsed import SCHEMAS
from tests.support.tiny_tokenizer import VOCAB_SIZE, byte_ids, tokenizer_json
from tests.unit.gateway.generation.test_generation import PlayedSession

VOCABULARY = Vocabulary(json.dumps(tokenizer_json()).encode(), sha256="x")
STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH
TOOLS = ToolSet(SCHEMAS)
PLAIN = ParserChoice()
THINKS = ParserChoice("", "qwen3")
CALLS = ParserChoice("hermes", "", TOOLS)
BOTH = ParserChoice("hermes", "qwen3", TOOLS)
MUST = ParserChoice("hermes", "", TOOLS, required=True)
ARRAY = ParserChoice("json", "", TOOLS, required=True)
GPT = ParserChoice("openai", "gptoss", TOOLS)


@dataclass
class Answer:
    """A choice as its client gets it."""

    content: str
    reasoning: str
    calls: list[tuple[str, str]]
    reason: str
    stop: str | int | None
    tokens: int
    ids: list[int]
    bytes: bytes
    reasoning_tokens: int
    aborted: bool


def told(result: ChoiceResult) -> tuple[str, str, list[tuple[str, str]]]:
    content, reasoning, calls = "", "", list[tuple[str, str]]()
    for part in [Content(result.text)] if result.parts is None else result.parts:
        match part:
            case Content(text):
                content += text
            case Reasoning(text):
                reasoning += text
            case ToolCallStart(_, _, name):
                calls.append((name, ""))
            case ToolCallArguments(_, text):
                calls[-1] = (calls[-1][0], calls[-1][1] + text)
    return content, reasoning, calls


async def run(
    text: str,
    stops: list[str],
    parsing: ParserChoice,
    *,
    tail: str = "",
    sizes: tuple[int, ...] = (1,),
    reason: common_pb2.FinishReason.ValueType = STOP,
    **fields: Any,
) -> Answer:
    """The engine writes `text`, a token a byte, in batches of these sizes over and over."""
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stop": stops, **fields}
    body |= {"logprobs": True, "return_token_ids": True, "max_tokens": 5000}
    request = parse_request(ChatRequest, body, RequestLimits())
    prepared = Prepared(
        request_id="r",
        model=Model("m", 10_000, VOCAB_SIZE, VOCABULARY),
        fields=request,
        prompt=[byte_ids("p")],
        prompt_param="messages",
        parsing=parsing,
    )
    plan = make_plan(prepared, Rendered([byte_ids("p")], [tail]))
    session = PlayedSession()
    played: Any = session
    generation = Generation(plan, played, max_unread_tokens=10_000, deadline=1e12, on_tokens=_rising)
    await generation.submit(None)
    ids, turn, results = byte_ids(text), 0, None
    gathering = asyncio.ensure_future(collect(generation))
    while not gathering.done():
        size = sizes[turn % len(sizes)]
        some, ids, turn = ids[:size], ids[size:], turn + 1
        session.feeds[0].extend(some, [TokenLogprob(-1.0, (), ())] * len(some))
        if not ids:
            session.feeds[0].finish(SequenceEnded(reason))
        for _ in range(4):
            await asyncio.sleep(0)
    (results,) = await gathering
    usage = generation.usage()
    details = usage.completion_tokens_details
    return Answer(
        *told(results),
        results.finish_reason,
        results.stop_reason,
        usage.completion_tokens,
        list(results.token_ids or ()),
        b"".join(entry.data or b"" for entry in results.entries or ()),
        0 if details is None else details.reasoning_tokens,
        bool(session.aborted),
    )


def _rising(_: int, count: int) -> None:
    assert count >= 0


def answer(text: str, stops: list[str], parsing: ParserChoice, **options: Any) -> Answer:
    """The same, however the tokens come."""
    whole = asyncio.run(run(text, stops, parsing, sizes=(10_000,), **options))
    single = asyncio.run(run(text, stops, parsing, **options))
    uneven = asyncio.run(run(text, stops, parsing, sizes=(3, 1, 7), **options))
    # One that ends within the last batch needs no end of its own.
    single.aborted = uneven.aborted = whole.aborted
    assert single == uneven == whole
    assert len(whole.ids) == whole.tokens
    return whole


CALL = '<tool_call>\n{"name": "run_code", "arguments": {"source": "a\\nObservation: b"}}\n</tool_call>'
ARGUMENTS = '{"source": "a\\nObservation: b"}'
THOUGHT = "<think>\nFirst the Question: then STOP it\n</think>\n\n"


@pytest.mark.parametrize("stop", ["Question:", "</think>", "First", "\n</th", "think", "it\n"])
def test_thoughts_go_on(stop: str) -> None:
    found = answer(THOUGHT + "The answer.", [stop], THINKS)
    assert (found.reasoning, found.content) == ("First the Question: then STOP it", "The answer.")
    assert (found.reason, found.stop, found.aborted) == ("stop", None, False)
    assert found.tokens == len(THOUGHT + "The answer.")


@pytest.mark.parametrize("stop", ["\n", "\n\n"])
def test_white_space_around_thoughts_is_no_content(stop: str) -> None:
    found = answer(THOUGHT + "One.\n\nTwo.", [stop], THINKS)
    assert (found.reasoning, found.content) == ("First the Question: then STOP it", "One.")
    assert (found.reason, found.stop) == ("stop", stop)
    assert found.tokens == len(THOUGHT + "One." + stop)


@pytest.mark.parametrize("include", [False, True])
def test_the_answer_behind_thoughts_ends(include: bool) -> None:
    text = THOUGHT + "The answer STOP here"
    found = answer(text, ["STOP"], THINKS, include_stop_str_in_output=include)
    shown = text[: text.rindex("STOP") + 4 * include]
    assert found.reasoning == "First the Question: then STOP it"
    assert found.content == "The answer " + "STOP" * include
    assert (found.reason, found.stop) == ("stop", "STOP")
    assert found.tokens == text.rindex("STOP") + 4
    assert found.bytes == shown.encode()
    assert found.reasoning_tokens == text.index("</think>") + len("</think>")


def test_thoughts_that_the_prompt_opened_go_on() -> None:
    text = "a STOP b</think>c STOP d"
    found = answer(text, ["STOP"], THINKS, tail="<think>\n")
    assert (found.reasoning, found.content, found.stop) == ("a STOP b", "c ", "STOP")
    assert found.tokens == text.rindex("STOP") + 4
    # Without a parser for them there are no thoughts.
    assert answer(text, ["STOP"], PLAIN).content == "a "
    # Nothing closed them, or the template closed them at once.
    assert answer("a STOP b", ["STOP"], THINKS, tail="<think>\n", reason=LENGTH).stop is None
    assert answer("a STOP b", ["STOP"], THINKS, tail="<think>\n\n</think>\n\n").content == "a "


@pytest.mark.parametrize("stop", ["Observation", "}", "f", '"', "arguments", "<tool_call>", "\n", "run_code"])
@pytest.mark.parametrize("parsing", [CALLS, MUST, BOTH])
def test_calls_go_on(stop: str, parsing: ParserChoice) -> None:
    found = answer(CALL, [stop], parsing)
    assert (found.content, found.calls) == ("", [("run_code", ARGUMENTS)])
    assert (found.reason, found.stop) == ("tool_calls", None)
    assert found.tokens == len(CALL)


def test_calls_as_an_array_go_on() -> None:
    text = f'[{{"name": "run_code", "parameters": {ARGUMENTS}}}, {{"name": "now", "parameters": {{}}}}]'
    for stop in ("Observation", "}", '", "', "[", ", "):
        found = answer(text, [stop], ARRAY)
        assert (found.calls, found.content) == ([("run_code", ARGUMENTS), ("now", "{}")], "")
        assert (found.reason, found.stop) == ("tool_calls", None)


def test_content_around_calls_ends() -> None:
    found = answer("Let me STOP" + CALL, ["STOP"], CALLS)
    assert (found.content, found.calls, found.reason) == ("Let me ", [], "stop")
    found = answer("See: \n" + CALL + "\nDone STOP" + CALL, ["STOP"], CALLS)
    assert (found.content, found.calls) == ("See:Done ", [("run_code", ARGUMENTS)])
    assert (found.reason, found.stop) == ("tool_calls", "STOP")
    assert found.tokens == len("See: \n" + CALL + "\nDone STOP")
    # A call between them: no stop string begins in one text and ends in another.
    found = answer("ST" + CALL + "OP STOP", ["STOP"], CALLS)
    assert (found.content, found.calls) == ("STOP ", [("run_code", ARGUMENTS)])
    # What only looked like a call is content.
    found = answer("<tool_call>no STOP call", ["STOP"], CALLS)
    assert (found.content, found.stop, found.tokens) == ("<tool_call>no ", "STOP", 18)


def test_channels() -> None:
    text = (
        "<|channel|>analysis<|message|>a STOP<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.run_code<|message|>{"source": "STOP"}<|call|><|start|>assistant<|channel|>final'
        "<|message|>c STOP d"
    )
    found = answer(text, ["STOP"], GPT, tail="<|start|>assistant")
    assert (found.reasoning, found.content) == ("a STOP", "c ")
    assert (found.calls, found.stop) == ([("run_code", '{"source": "STOP"}')], "STOP")
    assert found.tokens == len(text) - 2


def test_a_stop_string_at_the_end() -> None:
    for text, content in (("a\n\n", "a"), ("a ST", "a ST"), ("a STO<", "a STO<")):
        found = answer(text, ["\n\n", "STOP"], BOTH)
        assert found.content == content
        assert (found.reason, found.stop) == ("stop", "\n\n" if content == "a" else None)
    assert answer("a\n\n", ["\n\n"], CALLS, reason=LENGTH).reason == "stop"


def test_min_tokens_hold_in_parsed_texts() -> None:
    text = "abcabcabc"
    for parsing in (PLAIN, CALLS, THINKS):
        for count in range(10):
            found = answer(text, ["bc"], parsing, min_tokens=count)
            # Text of these tokens is not searched at all.
            place = text.find("bc", count)
            assert found.content == (text if place < 0 else text[:place])


@given(
    st.text("ab \n<é", max_size=24),
    st.lists(st.text("ab \n<é", min_size=1, max_size=3), min_size=1, max_size=3),
    st.booleans(),
    st.integers(0, 3),
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
)
def test_plain_text_ends_as_it_does_without_a_parser(
    text: str, stops: list[str], include: bool, least: int, sizes: list[int]
) -> None:
    options: dict[str, Any] = {"include_stop_str_in_output": include, "min_tokens": least}
    expected = asyncio.run(run(text or "x", stops, PLAIN, sizes=(10_000,), **options))
    found = asyncio.run(run(text or "x", stops, CALLS, sizes=tuple(sizes), **options))
    found.aborted = expected.aborted
    assert found == expected


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "a", "ST", "OP", "\n", " ", CALL, CALL[:40], "<"])),
    st.sampled_from([BOTH, CALLS, THINKS, MUST]),
    st.sampled_from(["", "<think>\n"]),
)
def test_any_answer_ends_alike_however_it_comes(pieces: list[str], parsing: ParserChoice, tail: str) -> None:
    found = answer("".join(pieces) or "x", ["STOP", "\n\n", "a "], parsing, tail=tail)
    assert not any(stop in found.content for stop in ("STOP", "\n\n", "a ")) or CALL in "".join(pieces)
