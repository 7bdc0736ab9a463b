"""Detect, with small dialogues, what a chat template reads and writes, and the parsers that answers need.

A template shows the model's own calls and thoughts when it renders an assistant's earlier turns. A parser is
chosen where the probes' call stands in such a turn as the parser would read it; a marker somewhere in the
template's source says nothing, since families share markers around different formats.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from jinja2.exceptions import SecurityError

from catenary.parsers import NO_PARSER
from services.tokenizer.rendering.inputs import (
    ChatInputs,
    ChatTurn,
    JsonLimits,
    MessageStyle,
    NoContent,
    TurnCall,
    messages_of,
)

NAME, KEY, VALUE = "catenary_probe", "probed", "catenary value"
"""Of the probes' call: the function, its parameter and that one's value."""
# Nine letters: some templates want ids of just that length.
CALL_ID = "callprobe"
THOUGHTS = "catenary thoughts"
"""The reasoning of the probes' assistant."""

_QUESTION, _RESULT, _ANSWER = "catenary question", "catenary result", "catenary answer"
_CALL = TurnCall(CALL_ID, NAME, json.dumps({KEY: VALUE}))
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": NAME,
            "description": "Probes.",
            "parameters": {
                "type": "object",
                "properties": {KEY: {"type": "string", "description": "Anything."}},
                "required": [KEY],
            },
        },
    }
]
_USER = ChatTurn("user", _QUESTION)
_CALLING = (
    _USER,
    ChatTurn("assistant", None, tool_calls=(_CALL,)),
    ChatTurn("tool", _RESULT, tool_call_id=CALL_ID),
)
_SECOND = TurnCall("callsecnd", "catenary_second", _CALL.arguments)
_SECOND_RESULT = "catenary finding"
# Conversations whose calls and results some templates show only if they are told of them in another way.
_REWRITTEN = (
    ((_USER, ChatTurn("assistant", _ANSWER, tool_calls=(_CALL,)), _CALLING[2]), "text_apart"),
    (
        (_USER, ChatTurn("assistant", _ANSWER, tool_calls=(_CALL,), reasoning=THOUGHTS), _CALLING[2]),
        "text_apart_from_thoughts",
    ),
    (
        (
            _USER,
            ChatTurn("assistant", None, tool_calls=(_CALL, _SECOND)),
            _CALLING[2],
            ChatTurn("tool", _SECOND_RESULT, tool_call_id=_SECOND.id),
        ),
        "one_call",
    ),
)
# No JSON object, as of a call that was cut.
_BROKEN = '{"catenary broken'
# What is printed where a text was meant: parts, an object, or JSON that is put into quotes once more.
_PRINTED_PART, _PRINTED_ARGUMENTS = "'type'", ("{'" + KEY, '{\\"' + KEY)
# Switches of templates, in addition to none at all.
_SWITCHES = ({}, *({name: on} for name in ("enable_thinking", "thinking") for on in (True, False)))

Render = Callable[[ChatInputs], str]


@dataclass(frozen=True, slots=True)
class Written:
    """The output of a template for the probes. Empty: the template refuses them, or shows nothing of them."""

    call: str
    """From the end of the question to the call's result."""
    call_begins: str
    """The same, behind what it writes to begin an answer: the answer that would be written so."""
    prompts: tuple[str, ...]
    """A question with tools and without, under each setting of the switches for thoughts."""
    thoughts: tuple[str, ...]
    """Turns with thoughts."""
    cuts_thoughts: bool
    """`<think>...</think>` is left out of an earlier answer."""


def detect_style(render: Render) -> MessageStyle:
    """Return the style in which a template shows the probes' call, or at least takes it.

    Raises SecurityError if a plain question breaks the sandbox already."""
    styles = list(_styles(MessageStyle(parts=_wants_parts(render))))
    showing = (_showing_style(render, styles, *how) for how in _dialogues())
    taking = (style for how in _dialogues() for style in styles if _takes(render, style, *how))
    style = next(filter(None, showing), None) or next(taking, styles[0])
    style = replace(style, takes_any_arguments=_takes_any_arguments(render, style))
    for turns, apart in _REWRITTEN:
        # Only where it helps: templates that show no calls lose nothing.
        flag: dict[str, Any] = {apart: True}
        changed = replace(style, **flag)
        if not _shows_all(render, style, turns) and _shows_all(render, changed, turns):
            style = changed
    return style


def written(render: Render, style: MessageStyle, variables: frozenset[str]) -> Written:
    """Return the output of a template of this style for the probes. `variables`: those that it reads."""
    call = next(filter(None, (_shown_call(render, style, *how) for how in _dialogues())), "")
    plain = _render(render, [_USER], style, tools=True)
    begin = (plain or "").rpartition(_QUESTION)[2].rstrip()
    prompts = [
        _render(render, [_USER], style, tools=tools, variables=switch)
        for switch, tools in product(_SWITCHES, (True, False))
        if switch.keys() <= variables
    ]
    thinking = ChatTurn("assistant", None, tool_calls=(_CALL,), reasoning=THOUGHTS)
    turns: list[list[ChatTurn]] = [
        [_USER, thinking, _CALLING[2]],
        [_USER, thinking],
        [_USER, ChatTurn("assistant", _ANSWER, reasoning=THOUGHTS)],
        [_USER, ChatTurn("assistant", _ANSWER, reasoning=THOUGHTS), _USER],
    ]
    tagged = ChatTurn("assistant", f"<think>\n{THOUGHTS}\n</think>\n\n{_ANSWER}")
    # Some keep the thoughts of the last answer.
    dialogue = [_USER, tagged, _USER, ChatTurn("assistant", _ANSWER), _USER]
    later = _render(render, dialogue, style, tools=False) or ""
    return Written(
        call,
        call[len(begin) :].lstrip() if begin and call.startswith(begin) else "",
        tuple(prompt for prompt in prompts if prompt),
        tuple(filter(None, (_render(render, each, style, tools=False) for each in turns))),
        later.count(_ANSWER) == 2 and THOUGHTS not in later,
    )


def _dialogues() -> Iterator[tuple[Sequence[ChatTurn], bool]]:
    """Yield dialogues with a call, and whether tools come along: templates refuse some, and show others."""
    yield from product((_CALLING, _CALLING[:2]), (True, False))


def _styles(style: MessageStyle) -> Iterator[MessageStyle]:
    for text_arguments, no_content in product((False, True), NoContent):
        yield replace(style, text_arguments=text_arguments, no_content=no_content)


def _showing_style(
    render: Render, styles: Sequence[MessageStyle], turns: Sequence[ChatTurn], tools: bool
) -> MessageStyle | None:
    """Return the first style in which the call is shown, best as what it is."""
    found = None
    for style in styles:
        shown = _shown_call(render, style, turns, tools)
        if shown and not any(printed in shown for printed in (*_PRINTED_ARGUMENTS, "None", "null")):
            return style
        found = found or (style if shown else None)
    return found


def _takes(render: Render, style: MessageStyle, turns: Sequence[ChatTurn], tools: bool) -> bool:
    """Whether the template renders a call at all; many show none."""
    return _render(render, turns, style, tools=tools) is not None


def _shown_call(render: Render, style: MessageStyle, turns: Sequence[ChatTurn], tools: bool) -> str:
    """Return the text between the question and the result, if the call is in it."""
    shown = (_render(render, turns, style, tools=tools) or "").partition(_RESULT)[0]
    turn = shown.rpartition(_QUESTION)[2]
    return turn if VALUE in turn and (NAME in turn or CALL_ID in turn) else ""


def _shows_all(render: Render, style: MessageStyle, turns: Sequence[ChatTurn]) -> bool:
    """Whether all calls and results of a conversation show."""
    wanted = [turn.content for turn in turns if turn.role == "tool"]
    calls = [call for turn in turns for call in turn.tool_calls]
    for tools in (True, False):
        shown = _render(render, turns, style, tools=tools)
        told = (shown or "").rpartition(_QUESTION)[2]
        if all(text in told for text in wanted if text) and told.count(VALUE) >= len(calls):
            return all(call.name in told or call.id in told for call in calls)
    return False


def _takes_any_arguments(render: Render, style: MessageStyle) -> bool:
    """Whether arguments that are no object are shown as they are."""
    call = TurnCall(CALL_ID, NAME, _BROKEN)
    turns = (_USER, ChatTurn("assistant", None, tool_calls=(call,)), _CALLING[2])
    as_text = replace(style, takes_any_arguments=True)
    escaped = json.dumps(_BROKEN)[1:-1]
    for length, tools in product((3, 2), (True, False)):
        shown = _render(render, turns[:length], as_text, tools=tools)
        if shown is not None and (_BROKEN in shown or escaped in shown):
            return True
    return False


def _wants_parts(render: Render) -> bool:
    """Return whether the template walks a list of parts, as those of multimodal models do: a plain string
    would not be shown."""
    broken: SecurityError | None = None
    refused = False
    for parts in (False, True):
        inputs = _inputs([_USER], MessageStyle(parts=parts))
        try:
            shown = render(inputs)
        except SecurityError as error:
            broken = error
            continue
        except Exception:
            refused = True
            continue
        # A template that expects text prints a list as Python does.
        if _QUESTION in shown and _PRINTED_PART not in shown:
            return parts
        refused = True
    if broken is not None and not refused:
        raise broken
    return False


def _render(
    render: Render,
    turns: Sequence[ChatTurn],
    style: MessageStyle,
    *,
    tools: bool,
    variables: dict[str, Any] | None = None,
) -> str | None:
    """Return the output of the template. None if it refuses, as one may that demands a dialogue of a certain
    shape, or breaks the sandbox in a part that other dialogues do not reach."""
    try:
        return render(_inputs(turns, style, tools=tools, variables=variables))
    except Exception:
        return None


def _inputs(
    turns: Sequence[ChatTurn],
    style: MessageStyle,
    *,
    tools: bool = False,
    variables: dict[str, Any] | None = None,
) -> ChatInputs:
    messages = messages_of(turns, style, JsonLimits())
    # A template may change the lists that it is given: each rendering has its own.
    return ChatInputs(messages, deepcopy(_TOOLS) if tools else None, None, variables or {})


@dataclass(frozen=True, slots=True)
class Parsers:
    """Names from catenary/parsers.py; empty: none."""

    tool: str = ""
    reasoning: str = ""
    response_template: str = ""
    """JSON that describes them better than the names, unless an operator named any."""

    def chosen(self, tool: str | None, reasoning: str | None) -> Parsers:
        """Return the same with what an operator says instead: a name, or `none`."""
        return Parsers(
            _named(tool, self.tool),
            _named(reasoning, self.reasoning),
            self.response_template if tool is None and reasoning is None else "",
        )


def _named(name: str | None, found: str) -> str:
    return found if name is None else "" if name == NO_PARSER else name


@dataclass(frozen=True, slots=True)
class _Sign:
    """A parser, and what it reads."""

    parser: str
    pattern: re.Pattern[str]

    def found(self, text: str) -> bool:
        """Whether it stands in `text`."""
        return self.pattern.search(text) is not None


_ARGUMENTS = r'\{ "@key" : "@value" \}'
# Further fields of a call, such as its id.
_REST = r'(?: , "\w+" : "[^"]*")*'
_OBJECT = rf'\{{ (?:"\w+" : "[^"]*" , )*"name" : "@name" , "(?:arguments|parameters)" : @args{_REST} \}}'
_ARGUMENTS_FIRST = r'\{ "(?:arguments|parameters)" : @args , "name" : "@name" \}'
# Those of the probes, by the words that stand for them in a pattern; a blank is any white space.
_WORDS = {
    "@call": f"(?:{_OBJECT}|{_ARGUMENTS_FIRST})",
    "@args": _ARGUMENTS,
    " ": r"\s*",
    "@name": NAME,
    "@key": KEY,
    "@value": re.escape(VALUE),
    "@id": CALL_ID,
    "@thoughts": re.escape(THOUGHTS),
}


def _sign(parser: str, pattern: str) -> _Sign:
    for word, meaning in _WORDS.items():
        pattern = pattern.replace(word, meaning)
    return _Sign(parser, re.compile(pattern, re.DOTALL))


def _deepseek(words: str) -> str:
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


_BEGIN, _SEPARATOR, _END = map(_deepseek, ("tool call begin", "tool sep", "tool call end"))
_KIMI_ID = r"(?:functions\.)?(?:@name(?::\d+)?|@id)"
_PYTHON = r"@name\( @key = [\"']@value[\"'] \)"
_PYTHON_CALL = rf"\[ {_PYTHON} \]"
_COHERE_CALL = r'\{ (?:"\w+" : "[^"]*" , )*"tool_name" : "@name" , "parameters" : @args \}'


def _suffixed(name: str) -> str:
    return name + ":opensource"


_HY_CALL, _HY_SEPARATOR, _HY_KEY, _HY_VALUE = map(
    _suffixed, ("tool_call", "tool_sep", "arg_key", "arg_value")
)

# In a turn with the call.
_CALLS = (
    _sign(
        "kimi_k2",
        rf"<\|tool_call_begin\|> {_KIMI_ID} <\|tool_call_argument_begin\|> @args <\|tool_call_end\|>",
    ),
    _sign("openai", r"to=functions\.@name <\|channel\|>commentary[^{]*<\|message\|> @args"),
    _sign("openai", r"<\|channel\|>commentary to=functions\.@name[^{]*<\|message\|> @args"),
    _sign("deepseek_v3", rf"{_BEGIN}function{_SEPARATOR} @name ```json @args ``` {_END}"),
    _sign("deepseek_v31", rf"{_BEGIN} @name {_SEPARATOR} @args {_END}"),
    _sign("mistral", r"\[TOOL_CALLS\] \[ @call \]"),
    _sign("mistral", r"\[TOOL_CALLS\] @call"),
    _sign("mistral", r"\[TOOL_CALLS\] @name(?:\[CALL_ID\]\w*)?(?:\[ARGS\])? @args"),
    _sign(
        "qwen3_coder",
        "<tool_call> <function=@name> <parameter=@key> @value </parameter> </function> </tool_call>",
    ),
    _sign(
        "seed_oss",
        "<seed:tool_call> <function=@name> <parameter=@key>@value</parameter> </function> </seed:tool_call>",
    ),
    _sign("glm45", "<tool_call> @name <arg_key>@key</arg_key> <arg_value>@value</arg_value> </tool_call>"),
    _sign("granite", r"<\|tool_call\|> (?:\[ @call \]|@call)"),
    _sign("phi4_mini_json", r"functools \[ @call \]"),
    _sign("pythonic", rf"<\|python_start\|> {_PYTHON_CALL}"),
    # Llama 4's own template closes the marker before the call.
    _sign("pythonic", r"<\|python_start\|>(?:<\|python_end\|>)? @call"),
    _sign("lfm2", rf"<\|tool_call_start\|> (?:{_PYTHON_CALL}|\[ @call \]) <\|tool_call_end\|>"),
    _sign("olmo3", f"<function_calls> {_PYTHON} </function_calls>"),
    _sign("nemotron_json", r"<TOOLCALL> \[ @call \] </TOOLCALL>"),
    _sign("apriel", r"<tool_calls> \[ @call \] </tool_calls>"),
    _sign("minimax", "<tool_calls> @call </tool_calls>"),
    _sign(
        "minimax_m2",
        '<minimax:tool_call> <invoke name="@name"> <parameter name="@key">@value</parameter> </invoke> '
        "</minimax:tool_call>",
    ),
    _sign(
        "hy_v3",
        f"<{_HY_CALL}> @name <{_HY_SEPARATOR}> <{_HY_KEY}>@key</{_HY_KEY}> <{_HY_VALUE}>@value</{_HY_VALUE}> "
        f"</{_HY_CALL}>",
    ),
    _sign("gigachat3", r"(?:<\|function_call\|>|function call<\|role_sep\|>) @call"),
    _sign("internlm", r"<\|action_start\|> <\|plugin\|> @call <\|action_end\|>"),
    _sign("cohere_command3", rf"<\|START_ACTION\|> \[ {_COHERE_CALL} \] <\|END_ACTION\|>"),
    _sign("longcat", "<longcat_tool_call> @call </longcat_tool_call>"),
    _sign("functionary_v31", "<function=@name> @args </function>"),
    _sign("llama3_json", r"<\|python_tag\|> @call"),
    _sign("hermes", "<tool_call> @call </tool_call>"),
)
# At the beginning of an answer: without a marker, a call is read nowhere else.
_BARE = (
    _sign("pythonic", rf"^{_PYTHON_CALL}"),
    _sign("xlam", r"^\[ @call \]"),
    _sign("llama3_json", "^@call"),
)
# In the words with which a template tells the model of a format: Meta's, whose history has calls as JSON, and
# those of templates that never show a call.
_PYTHONIC = _sign("pythonic", r"\[func_name1\(params_name1=")
_TOLD = (
    _PYTHONIC,
    _sign("granite", r"<\|tool_call\|>[^.<]* JSON list"),
    _sign("phi4_mini_json", r'functools\[ \{ "name"'),
    _sign(
        "hermes",
        '<tool_call> { "name":[^<>]*(?:<[^<>]*>)?[^<>]*"arguments":[^<]*(?:<args[^<]*)?} </tool_call>',
    ),
)
_THOUGHTS = (
    _sign("gptoss", r"<\|channel\|>analysis<\|message\|> @thoughts"),
    _sign("mistral", r"\[THINK\] @thoughts \[/THINK\]"),
    _sign("seed_oss", "<seed:think> @thoughts </seed:think>"),
    _sign("hy_v3", "<think:opensource> @thoughts </think:opensource>"),
    _sign("cohere_command3", r"<\|START_THINKING\|> @thoughts <\|END_THINKING\|>"),
    _sign("apriel", r"@thoughts \[BEGIN FINAL RESPONSE\]"),
)
_TOLD_THOUGHTS = (
    _sign("seed_oss", "<seed:think> $"),
    _sign("mistral", r"\[THINK\].*\[/THINK\]"),
    _sign("granite", "Here is my thought process:"),
    _sign("apriel", r"\[BEGIN FINAL RESPONSE\]"),
)
# Between the same tags under several names.
_TAGGED = _sign("deepseek_r1", "<think> (?:@thoughts)? </think>")
_OPENS = _sign("deepseek_r1", "<think>.*</think>|(?:<think>|</think>) $")
_KIMI_TURN = "<|im_middle|>"


def detect_parsers(templates: Sequence[tuple[Written, frozenset[str]]]) -> Parsers:
    """Return the parsers for a model with these templates: what each writes, and the variables that it reads.

    Of calls the first one says, of thoughts all."""
    if not templates:
        return Parsers()
    tool = _tool(templates[0][0])
    found = (_reasoning(shown, variables, tool) for shown, variables in templates)
    return Parsers(tool, next(filter(None, found), ""))


def _tool(shown: Written) -> str:
    told = next((sign.parser for sign in _TOLD if any(map(sign.found, shown.prompts))), "")
    if not shown.call:
        return told
    calls = (sign.parser for sign in _CALLS if sign.found(shown.call))
    bare = (sign.parser for sign in _BARE if sign.found(shown.call_begins))
    call = next(calls, "") or next(bare, "")
    # Its calls may be JSON in the history all the same, which the parser reads too.
    return _PYTHONIC.parser if call == "llama3_json" and told == _PYTHONIC.parser else call


def _reasoning(shown: Written, variables: frozenset[str], tool: str) -> str:
    for signs, texts in ((_THOUGHTS, shown.thoughts), (_TOLD_THOUGHTS, shown.prompts)):
        for sign in signs:
            if any(map(sign.found, texts)):
                return sign.parser
    tagged = any(map(_TAGGED.found, shown.thoughts)) or any(map(_OPENS.found, shown.prompts))
    if not tagged and not shown.cuts_thoughts:
        return ""
    # One format, whose names vLLM's users know by the model.
    if tool == "glm45":
        return "glm45"
    if any(_KIMI_TURN in prompt for prompt in shown.prompts):
        return "kimi_k2"
    return "qwen3" if "enable_thinking" in variables else "deepseek_r1"
