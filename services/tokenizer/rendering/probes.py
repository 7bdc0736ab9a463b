"""Finding out, with small dialogues, how a template wants to be told of messages and what it writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from jinja2.exceptions import SecurityError

from services.tokenizer.rendering.inputs import ChatInputs, MessageStyle, NoContent, messages_of
from services.tokenizer.rendering.turns import ChatTurn, TurnCall
from services.tokenizer.rendering.values import JsonLimits

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
# Switches of templates, beside none at all.
_SWITCHES = ({}, *({name: on} for name in ("enable_thinking", "thinking") for on in (True, False)))

Render = Callable[[ChatInputs], str]


@dataclass(frozen=True, slots=True)
class Written:
    """What a template writes for the probes. Empty: it refuses them, or shows nothing of them."""

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
    """The style in which a template shows the probes' call, or at least takes it.

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
    """What a template of this style writes for the probes. `variables`: those that it reads."""
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
    """Dialogues with a call, and whether tools come with them: templates refuse some, and show others."""
    yield from product((_CALLING, _CALLING[:2]), (True, False))


def _styles(style: MessageStyle) -> Iterator[MessageStyle]:
    for text_arguments, no_content in product((False, True), NoContent):
        yield replace(style, text_arguments=text_arguments, no_content=no_content)


def _showing_style(
    render: Render, styles: Sequence[MessageStyle], turns: Sequence[ChatTurn], tools: bool
) -> MessageStyle | None:
    """The first style in which the call is shown, best as what it is."""
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
    """What is written between the question and the result, if the call is in it."""
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
    """Templates of multimodal models walk a list of parts, and would show nothing of a plain string."""
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
    """What the template writes; None if it refuses, as one may that demands a dialogue of a certain shape, or
    breaks the sandbox in a part that other dialogues do not reach."""
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
