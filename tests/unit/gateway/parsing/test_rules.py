"""Rules that hold for all parsers: what is held back, cut short, refused, or left out."""

from __future__ import annotations

import json

import pytest

from gateway.parsing.choice import TOOL_PARSERS, ParserChoice
from gateway.parsing.output import Content, Part, Reasoning, ToolCallArguments, ToolCallStart
from gateway.parsing.tags import tag_for
from gateway.parsing.toolset import ToolSet
from tests.support.parsed import SCHEMAS

TOOLS = ToolSet(SCHEMAS)
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def feed(choice: ParserChoice, *pieces: str, tail: str = "") -> list[list[Part]]:
    """The parts of each piece, and the last ones."""
    parser = choice.parser(tail)
    return [*map(parser.feed, pieces), parser.finish()]


def joined(parts: list[list[Part]], kind: type[Content] | type[Reasoning] | type[ToolCallArguments]) -> str:
    return "".join(part.text for some in parts for part in some if isinstance(part, kind))


def names(parts: list[list[Part]]) -> list[str]:
    return [part.name for some in parts for part in some if isinstance(part, ToolCallStart)]


def test_text_is_held_back_only_while_it_may_begin_a_marker() -> None:
    parts = feed(ParserChoice("hermes", "", TOOLS), "a", " <to", "ast> b", "<", "3")
    assert parts[:5] == [[Content("a")], [], [Content(" <toast> b")], [], [Content("<3")]]


def test_arguments_stream_as_they_come() -> None:
    parts = feed(
        ParserChoice("hermes", "", TOOLS),
        '<tool_call>{"name": "get_weather", "arguments": {"ci',
        'ty": "Pa',
        'ris"}}',
    )
    assert [type(part) for part in parts[0]] == [ToolCallStart, ToolCallArguments]
    assert [part.text for some in parts for part in some if isinstance(part, ToolCallArguments)] == [
        '{"ci',
        'ty": "Pa',
        'ris"}',
    ]


def test_strings_of_tagged_parameters_stream_too() -> None:
    parts = feed(
        ParserChoice("qwen3_coder", "", TOOLS),
        "<tool_call>\n<function=run_code>\n<parameter=source>\nprint(",
        '"hi")',
        "\n</parameter>\n</function>",
    )
    assert joined(parts[:1], ToolCallArguments) == '{"source": "print('
    assert joined(parts[1:2], ToolCallArguments) == '\\"hi\\")'
    assert json.loads(joined(parts, ToolCallArguments)) == {"source": 'print("hi")'}


@pytest.mark.parametrize("cut", range(len(CALL)))
def test_a_call_cut_short_is_told_as_far_as_it_came(cut: int) -> None:
    """Until its arguments begin it is content; behind that, what there is of them."""
    choice = ParserChoice("hermes", "", TOOLS)
    parser = choice.parser("")
    parts = [parser.feed(CALL[:cut]), parser.finish()]
    begun = CALL.index("{", 20) < cut
    assert names(parts) == (["get_weather"] if begun else [])
    assert joined(parts, Content) == ("" if begun else CALL[:cut])
    assert '{"city": "Paris"}'.startswith(joined(parts, ToolCallArguments))
    assert parser.called == (cut > CALL.index("}"))


def test_at_most_one_call_if_one_is_wanted() -> None:
    parts = feed(ParserChoice("hermes", "", ToolSet(SCHEMAS, single=True)), CALL, CALL)
    assert names(parts) == ["get_weather"]
    assert joined(parts, ToolCallArguments) == '{"city": "Paris"}'
    assert joined(parts, Content) == ""


def test_only_what_is_allowed_is_called() -> None:
    parts = feed(ParserChoice("hermes", "", ToolSet(SCHEMAS, frozenset({"now"}))), CALL)
    assert names(parts) == []
    assert joined(parts, Content) == CALL
    invented = CALL.replace("get_weather", "get_moon")
    assert names(feed(ParserChoice("hermes", "", TOOLS), invented)) == ["get_moon"]
    odd = CALL.replace("get_weather", "get weather; rm")
    assert joined(feed(ParserChoice("hermes", "", TOOLS), odd), Content) == odd


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ('<tool_call>{"name": "now", "arguments": {"a": 01}}', "01}}"),
        ('<tool_call>{"name": "now", "arguments": {"a": nul}}', "nul}}"),
        ('<tool_call>{"name": "now", "arguments": {"a" 1}}', "1}}"),
        ('<tool_call>{"name": "now", "arguments": {"\\x": 1}}', '\\x": 1}}'),
    ],
)
def test_what_breaks_a_call_goes_on_as_content(text: str, content: str) -> None:
    parts = feed(ParserChoice("hermes", "", TOOLS), text)
    assert names(parts) == ["now"]
    assert joined(parts, Content) == content


def test_reasoning_tokens_are_counted_by_where_they_begin() -> None:
    parser = ParserChoice("", "qwen3").parser("")
    parser.feed("<think>ab</think>\n\ncd")
    #             <think> a  b  </think> \n\n c   d
    assert parser.reasoning_tokens([0, 7, 8, 9, 17, 19, 20]) == 4
    opened = ParserChoice("", "qwen3").parser("<think>\n")
    opened.feed("abc")
    assert opened.reasoning_tokens([0, 1, 2]) == 3


@pytest.mark.parametrize(
    ("tail", "continues", "reasoning"),
    [
        ("<think>\n", False, True),
        ("<think>\n\n</think>\n\n", False, False),
        # A user's text that spells the tag is not the template's.
        ("what is <think>?<|im_end|>\n<|im_start|>assistant\n", False, False),
        ("<think>\nI was", True, True),
        ("<think>a</think>b", True, False),
        ("plain", True, False),
    ],
)
def test_what_an_answer_begins_in_is_told_by_the_prompt(tail: str, continues: bool, reasoning: bool) -> None:
    choice = ParserChoice("", "deepseek_r1", continues=continues)
    parts = feed(choice, "thinking...", tail=tail)
    assert joined(parts, Reasoning) == ("thinking..." if reasoning else "")
    assert joined(parts, Content) == ("" if reasoning else "thinking...")


def test_ids_have_the_form_that_the_template_wants() -> None:
    def first_id(name: str, text: str) -> str:
        parts = feed(ParserChoice(name, "", TOOLS), text)
        return next(part.id for some in parts for part in some if isinstance(part, ToolCallStart))

    assert len(first_id("hermes", CALL)) == 29
    assert len(first_id("mistral", "[TOOL_CALLS]now{}")) == 9
    kimi = "<|tool_call_begin|>functions.now:4<|tool_call_argument_begin|>{}<|tool_call_end|>"
    assert first_id("kimi_k2", kimi) == "functions.now:4"


def test_ids_of_kimi_are_unique_in_a_conversation() -> None:
    def kimi(written: str) -> str:
        return f"<|tool_call_begin|>{written}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"

    taken = frozenset({"functions.now:0", "functions.get_weather:1", "functions.now:2"})
    text = "".join(map(kimi, ("functions.now:0", "functions.now:3", "functions.get_weather:4", "now", "now")))
    parts = feed(ParserChoice("kimi_k2", "", TOOLS, taken=taken), text)
    ids = [part.id for some in parts for part in some if isinstance(part, ToolCallStart)]
    # What the model wrote stays, unless it is taken: then the number goes on from the calls that there are.
    assert ids == ["functions.now:3", "functions.now:4", "functions.get_weather:4", "now", "functions.now:7"]
    assert not taken & set(ids)


def test_markers_of_a_request_are_known() -> None:
    assert "[TOOL_CALLS]" in ParserChoice("mistral", "", TOOLS).markers
    assert {"<think>", "</think>", "<tool_call>", "</tool_call>"} <= ParserChoice("hermes", "qwen3").markers
    assert "<|channel|>" in ParserChoice("openai", "").markers
    assert {"<|role_sep|>", "<|message_sep|>"} <= ParserChoice("gigachat3", "").markers
    assert {"</invoke>", "</minimax:tool_call>"} <= ParserChoice("minimax_m2", "").markers
    assert {"</function_calls>", "[END FINAL RESPONSE]"} <= ParserChoice("olmo3", "apriel").markers
    assert not ParserChoice().needed


@pytest.mark.parametrize("name", sorted(TOOL_PARSERS))
def test_what_a_tag_has_written_is_read(name: str) -> None:
    """A constraint writes calls by the format's tag, or as JSON where it has none."""
    tag = tag_for(name, "get_weather")
    if tag is None:
        text, name = '[{"name": "get_weather", "parameters": {"city": "Paris"}}]', "json"
    else:
        assert tag.begin.startswith(tag.trigger)
        text = tag.begin + '{"city": "Paris"}' + tag.end
    parts = feed(ParserChoice(name, "", TOOLS), text)
    assert names(parts) == ["get_weather"]
    assert joined(parts, ToolCallArguments) == '{"city": "Paris"}'
    assert joined(parts, Content) == ""


def test_a_constraint_waits_for_the_end_of_thoughts_that_the_template_opened() -> None:
    choice = ParserChoice("hermes", "qwen3", TOOLS)
    assert choice.thoughts_end("<think>\n") == "</think>"
    assert choice.thoughts_end("<|im_start|>assistant\n") is None
    assert ParserChoice("hermes", "", TOOLS).thoughts_end("<think>\n") is None
    final = "<|channel|>final<|message|>"
    assert ParserChoice("", "gptoss").thoughts_end("<|start|>assistant") == final
    assert ParserChoice("", "gptoss").thoughts_end("<|start|>assistant" + final) is None
    assert ParserChoice("openai", "gptoss", TOOLS).thoughts_end("<|start|>assistant") is None


@pytest.mark.parametrize("name", sorted(TOOL_PARSERS | {"json"}))
def test_what_is_cut_of_required_calls_is_never_content(name: str) -> None:
    """A grammar wrote it: the beginning of a call, a comma between two, a piece of a marker."""
    tag = tag_for(name, "get_weather")
    if tag is None:
        call = '{"name": "get_weather", "parameters": {"city": "Paris"}}'
        text, name = f"[{call}, {call}]", "json"
    else:
        call = tag.begin + '{"city": "Paris"}' + tag.end
        text = call + "\n" + call
    choice = ParserChoice(name, "", TOOLS, required=True)
    for cut in range(len(text)):
        for pieces in ([text[:cut]], list(text[:cut])):
            parts = feed(choice, *pieces)
            assert joined(parts, Content) == "", text[:cut]
    assert names(feed(choice, text)) == ["get_weather"] * 2


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mistral", '[TOOL_CALLS] [{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]'),
        ("granite", '<|tool_call|>[{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]'),
        ("phi4_mini_json", 'functools[{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]'),
        ("llama3_json", '{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}'),
        ("pythonic", "[now(), now()]"),
        ("json", '[{"name": "now", "parameters": {}}, {"name": "now", "parameters": {}}]'),
    ],
)
def test_a_list_that_is_cut_behind_a_call_has_no_content(name: str, text: str) -> None:
    begun = False
    for cut in range(len(text)):
        parts = feed(ParserChoice(name, "", TOOLS), text[:cut])
        begun = begun or bool(names(parts))
        assert not (begun and joined(parts, Content)), text[:cut]
    assert begun
    assert len(names(feed(ParserChoice(name, "", TOOLS), text))) == 2
