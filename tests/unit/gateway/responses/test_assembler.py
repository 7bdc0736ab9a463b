"""The items and events of a response do not depend on how the model's text was cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from gateway.parsing.output import Content, Part, Reasoning, ToolCallArguments, ToolCallStart
from gateway.responses import events
from gateway.responses.producer import OutputAssembler
from gateway.streaming.delta import ChatLogprob
from tests.support.responses import checked_event

TEXTS = st.text(min_size=1, max_size=12)


def counting() -> Callable[[str], str]:
    made: list[str] = []

    def new_id(prefix: str) -> str:
        made.append(prefix)
        return f"{prefix}{len(made)}"

    return new_id


@st.composite
def outputs(draw: st.DrawFn) -> list[Part]:
    """What a model may put out: any kinds in any order, calls with all of their arguments."""
    parts: list[Part] = []
    calls = 0
    for kind in draw(st.lists(st.sampled_from(["content", "reasoning", "call"]), max_size=6)):
        if kind == "content":
            parts.append(Content(draw(TEXTS)))
        elif kind == "reasoning":
            parts.append(Reasoning(draw(TEXTS)))
        else:
            parts.append(ToolCallStart(calls, f"call_{calls}", draw(st.sampled_from(["f", "g"]))))
            if text := draw(st.text(max_size=12)):
                parts.append(ToolCallArguments(calls, text))
            calls += 1
    return parts


def cut(draw: Callable[..., int], part: Part) -> list[Part]:
    """The same text in pieces."""
    if isinstance(part, ToolCallStart):
        return [part]
    made: list[Part] = []
    rest = part.text
    while rest:
        size = draw(st.integers(1, len(rest)))
        made.append(_with(part, rest[:size]))
        rest = rest[size:]
    return made


def _with(part: Content | Reasoning | ToolCallArguments, text: str) -> Part:
    if isinstance(part, ToolCallArguments):
        return ToolCallArguments(part.index, text)
    return type(part)(text)


def assembled(steps: list[list[Part]], *, is_cut: bool) -> tuple[bytes, list[events.Event]]:
    assembler = OutputAssembler(counting())
    made = [event for step in steps for event in assembler.feed(step)]
    made += assembler.finish(cut=is_cut)
    return msgspec.json.encode(assembler.output), made


@given(outputs(), st.booleans(), st.data())
def test_any_cut_gives_the_same_items(parts: list[Part], is_cut: bool, data: st.DataObject) -> None:
    whole, _ = assembled([parts], is_cut=is_cut)
    pieces = [piece for part in parts for piece in cut(data.draw, part)]
    steps: list[list[Part]] = [[]]
    for piece in pieces:
        if data.draw(st.booleans()):
            steps.append([])
        steps[-1].append(piece)
    output, made = assembled(steps, is_cut=is_cut)
    assert output == whole
    told = [msgspec.to_builtins(event) for event in made]
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    for event in told:
        checked_event(event)
    follow(told, msgspec.json.decode(output))


def follow(told: list[dict[str, Any]], output: list[dict[str, Any]]) -> None:
    """Rebuild the items from the events alone, as a client does."""
    items: list[dict[str, Any]] = []
    text, item_id, is_open = "", "", False
    for event in told:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert not is_open
            assert event["output_index"] == len(items)
            assert event["item"]["status"] == "in_progress"
            is_open, text, item_id = True, "", event["item"]["id"]
        elif kind == "output_item.done":
            assert is_open
            items.append(event["item"])
            is_open = False
        else:
            assert is_open
            assert (event["item_id"], event["output_index"]) == (item_id, len(items))
            text += event.get("delta", "")
            if kind in ("output_text.done", "reasoning_text.done"):
                assert event["text"] == text
            elif kind == "function_call_arguments.done":
                assert event["arguments"] == text
            elif kind == "content_part.done":
                assert event["part"]["text"] == text
    assert not is_open
    assert items == output


def test_an_answer_of_nothing_is_an_empty_message() -> None:
    output, made = assembled([], is_cut=False)
    (item,) = msgspec.json.decode(output)
    assert item["content"] == [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]
    assert [type(event) for event in made] == [
        *(events.ItemAdded, events.PartAdded, events.TextDone, events.PartDone, events.ItemDone),
    ]


def test_only_the_last_item_of_a_cut_answer_is_incomplete() -> None:
    parts: list[Part] = [Reasoning("a"), Content("b"), ToolCallStart(0, "c", "f"), ToolCallArguments(0, "{")]
    output, _ = assembled([parts], is_cut=True)
    assert [item["status"] for item in msgspec.json.decode(output)] == [
        "completed",
        "completed",
        "incomplete",
    ]


def test_log_probabilities_are_those_of_the_text() -> None:
    entries = [ChatLogprob(text, -1.0, list(text.encode()), []) for text in ("a", "b", "c")]
    assembler = OutputAssembler(counting())
    assembler.feed([Reasoning("x")], [])
    assembler.feed([Content("a")], entries[:1])
    assembler.feed([], entries[1:2])
    assembler.feed([Content("bc")], entries[2:])
    assembler.finish()
    item = msgspec.to_builtins(assembler.output[-1])
    assert [entry["token"] for entry in item["content"][0]["logprobs"]] == ["a", "b", "c"]
