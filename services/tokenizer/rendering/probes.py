"""Finding out, with small dialogues, how a template wants to be told of messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from jinja2.exceptions import SecurityError

from services.tokenizer.rendering.inputs import ChatInputs, MessageStyle, message_of
from services.tokenizer.rendering.turns import ChatTurn, TurnCall
from services.tokenizer.rendering.values import JsonLimits

_TEXT = "catenary probe"
# Nine letters: some templates want ids of just that length.
_CALL = TurnCall("callprobe", "catenary_probe", '{"probed": "value"}')
_CALLING = (
    ChatTurn("user", _TEXT),
    ChatTurn("assistant", None, tool_calls=(_CALL,)),
    ChatTurn("tool", _TEXT, tool_call_id=_CALL.id),
)
# A list or an object that was printed where a text was meant.
_PRINTED_PART, _PRINTED_ARGUMENTS = "'type'", "{'probed'"

Render = Callable[[ChatInputs], str]


def detect_style(render: Render) -> MessageStyle:
    """The style in which a template shows all of the probes. Raises SecurityError for a broken sandbox."""
    style = MessageStyle(parts=_wants_parts(render))
    for text_arguments in (False, True):
        for needs_content in (False, True):
            found = replace(style, text_arguments=text_arguments, needs_content=needs_content)
            shown = _shown(render, _CALLING, found)
            if shown is not None and _PRINTED_ARGUMENTS not in shown:
                return found
    return style


def _wants_parts(render: Render) -> bool:
    """Templates of multimodal models walk a list of parts, and would show nothing of a plain string."""
    for parts in (False, True):
        shown = _shown(render, [ChatTurn("user", _TEXT)], MessageStyle(parts=parts))
        # A template that expects text prints a list as Python does.
        if shown is not None and _TEXT in shown and _PRINTED_PART not in shown:
            return parts
    return False


def _shown(render: Render, turns: Sequence[ChatTurn], style: MessageStyle) -> str | None:
    """What the template writes; None if it refuses, as one may that demands a dialogue of a certain shape."""
    limits = JsonLimits()
    messages: list[dict[str, Any]] = [message_of(turn, style, limits) for turn in turns]
    try:
        return render(ChatInputs(messages, None, None, {}))
    except SecurityError:
        raise
    except Exception:
        return None
