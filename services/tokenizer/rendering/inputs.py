"""The inputs of a template: a chat as a request states it, and the plain data made of it, under limits.

The first travel to the workers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple

import msgspec

from catenary.json_bounds import Excess, json_excess
from services.tokenizer.rendering.files import RenderRefused


class TurnCall(msgspec.Struct, frozen=True, array_like=True):
    """A call of an assistant's message. `arguments` is a JSON object as text; empty counts as one."""

    id: str
    name: str
    arguments: str


class ChatTurn(msgspec.Struct, frozen=True, array_like=True):
    """A message, its text parts joined. `content` None: it has none, which is not an empty one."""

    role: str
    content: str | None
    name: str | None = None
    tool_calls: tuple[TurnCall, ...] = ()
    tool_call_id: str | None = None
    reasoning: str | None = None


class ChatOptions(msgspec.Struct, frozen=True):
    """The options of a chat, without its messages. Fields of JSON text are empty where there is nothing."""

    add_generation_prompt: bool = True
    # The prompt ends inside of the last message.
    continue_final_message: bool = False
    add_special_tokens: bool = False
    # A JSON array of function tools, one of documents, and an object of template variables.
    tools: str = ""
    documents: str = ""
    variables: str = ""
    # Name of one of the model's templates, or Jinja source where that is allowed.
    chat_template: str | None = None


class PromptLimits(msgspec.Struct, frozen=True):
    """Of each prompt: most tokens that fit, and how many of the last ones are kept of a longer one.

    `first_tokens`: only so many of the first ones matter, and those that the tokenizer puts behind a text.
    """

    max_tokens: int | None = None
    truncate_to: int | None = None
    first_tokens: int | None = None

    def kept(self, count: int) -> int:
        """Return how many of `count` tokens are left."""
        return count if self.truncate_to is None else min(count, self.truncate_to)


class JsonLimits(msgspec.Struct, frozen=True):
    """Of each JSON text: arrays and objects inside of one another, and values in all."""

    max_depth: int = 64
    max_values: int = 200_000


def read_json(text: str, *, param: str, limits: JsonLimits) -> Any:
    """Return the value of a JSON text: strict, so without NaN and lone surrogates. Raises RenderRefused."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise RenderRefused(f"Invalid '{param}': it is not valid JSON.", param=param) from None
    _check_bounds(value, param, limits)
    return value


def json_or_none(text: str, *, param: str, limits: JsonLimits) -> Any:
    """Read JSON as `read_json` does, but return None for invalid JSON. Raises RenderRefused beyond the
    limits."""
    try:
        value = msgspec.json.decode(text)
    except RecursionError:
        raise _too_deep(param, limits) from None
    except (msgspec.MsgspecError, ValueError):
        return None
    _check_bounds(value, param, limits)
    return value


def _check_bounds(value: Any, param: str, limits: JsonLimits) -> None:
    excess = json_excess(value, limits.max_depth, limits.max_values)
    if excess is Excess.DEPTH:
        raise _too_deep(param, limits)
    if excess is Excess.VALUES:
        raise RenderRefused(f"Invalid '{param}': it has more than {limits.max_values} values.", param=param)


def _too_deep(param: str, limits: JsonLimits) -> RenderRefused:
    return RenderRefused(
        f"Invalid '{param}': it is nested deeper than {limits.max_depth} levels.", param=param
    )


def read_objects(text: str, *, param: str, limits: JsonLimits) -> list[dict[str, Any]]:
    """Return an array of objects. Raises RenderRefused."""
    value = read_json(text, param=param, limits=limits)
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise RenderRefused(f"Invalid '{param}': it must be an array of objects.", param=param)
    return value


def read_object(text: str, *, param: str, limits: JsonLimits) -> dict[str, Any]:
    """Return an object. Raises RenderRefused."""
    value = read_json(text, param=param, limits=limits)
    if not isinstance(value, dict):
        raise RenderRefused(f"Invalid '{param}': it must be an object.", param=param)
    return value


def strings(value: Any) -> Iterator[str]:
    """Yield every text in plain data, names of fields included: a template may show those too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield name
            yield from strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """Return plain data with every text changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(name): map_strings(item, change) for name, item in value.items()}
    if isinstance(value, list):
        return [map_strings(item, change) for item in value]
    return value


INVALID_ARGUMENTS = "invalid_arguments"
"""The name under which a template that walks an object is shown arguments that are none."""


class NoContent(Enum):
    """How a template is told that a message has no content."""

    ABSENT = "absent"
    EMPTY = "empty"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class MessageStyle:
    """How a template wants to be told of a message."""

    parts: bool = False
    """Content as a list of parts."""
    no_content: NoContent = NoContent.ABSENT
    """The stand-in for the content of a message that has none."""
    text_arguments: bool = False
    """Arguments of a call as JSON text, where most templates want an object."""
    takes_any_arguments: bool = False
    """Arguments that are no object are shown as the text that they are."""
    reads_reasoning: bool = False
    """Thoughts have the name `reasoning` too."""
    text_apart: bool = False
    """Text next to calls is a message before theirs: with it, the template shows no calls."""
    text_apart_from_thoughts: bool = False
    """The same where thoughts come with them."""
    one_call: bool = False
    """A message has one call, with its results behind it: of more, the template shows not all."""


@dataclass(frozen=True, slots=True)
class ChatInputs:
    """None: the caller gave no tools, or no documents."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    documents: list[dict[str, Any]] | None
    variables: dict[str, Any]

    def strings(self) -> Iterator[str]:
        """Yield every text that a caller wrote, and some of ours."""
        for part in (self.messages, self.tools, self.documents, self.variables):
            yield from strings(part)

    def map(self, change: Callable[[str], str]) -> ChatInputs:
        """Return a copy with every text changed, but for the names of variables."""
        return ChatInputs(
            map_strings(self.messages, change),
            map_strings(self.tools, change),
            map_strings(self.documents, change),
            {name: map_strings(value, change) for name, value in self.variables.items()},
        )

    def with_messages(self, messages: list[dict[str, Any]]) -> ChatInputs:
        """Return a copy with other messages."""
        return replace(self, messages=messages)


def read_inputs(
    turns: Sequence[ChatTurn], options: ChatOptions, style: MessageStyle, limits: JsonLimits
) -> ChatInputs:
    """Return a request's parts as plain data. Raises RenderRefused for malformed JSON, or another form."""
    tools, documents, variables = options.tools, options.documents, options.variables
    return ChatInputs(
        messages_of(turns, style, limits),
        read_objects(tools, param="tools", limits=limits) if tools else None,
        read_objects(documents, param="documents", limits=limits) if documents else None,
        read_object(variables, param="chat_template_kwargs", limits=limits) if variables else {},
    )


def messages_of(turns: Sequence[ChatTurn], style: MessageStyle, limits: JsonLimits) -> list[dict[str, Any]]:
    """Return the messages of a chat, in the form and order that a template shows. Raises RenderRefused for
    arguments beyond the limits."""
    given = (_Given(turn, place) for place, turn in enumerate(turns))
    parts = (part for each in given for part in _apart(each, style))
    return [_message(each, style, limits) for each in (_one_by_one(parts) if style.one_call else parts)]


class _Given(NamedTuple):
    """A message, or a part of one: which it is in the request, and the place of its first call there."""

    turn: ChatTurn
    place: int
    position: int = 0


def _apart(given: _Given, style: MessageStyle) -> Iterator[_Given]:
    turn = given.turn
    apart = style.text_apart or (style.text_apart_from_thoughts and turn.reasoning is not None)
    if not (apart and turn.content and turn.tool_calls):
        yield given
        return
    yield given._replace(turn=msgspec.structs.replace(turn, tool_calls=(), reasoning=None))
    yield given._replace(turn=msgspec.structs.replace(turn, content=None))


def _one_by_one(messages: Iterable[_Given]) -> Iterator[_Given]:
    """Yield each call in a message of its own, with the results that answer it behind it."""
    calls: _Given | None = None
    results: list[_Given] = []
    for given in messages:
        if calls is not None and given.turn.role == "tool":
            results.append(given)
            continue
        if calls is not None:
            yield from _each_call(calls, results)
            calls, results = None, []
        if len(given.turn.tool_calls) > 1:
            calls = given
        else:
            yield given
    if calls is not None:
        yield from _each_call(calls, results)


def _each_call(calls: _Given, results: Iterable[_Given]) -> Iterator[_Given]:
    answers: dict[str | None, list[_Given]] = {}
    for result in results:
        answers.setdefault(result.turn.tool_call_id, []).append(result)
    turn = calls.turn
    later = Counter(call.id for call in turn.tool_calls)
    for position, call in enumerate(turn.tool_calls):
        yield _Given(msgspec.structs.replace(turn, tool_calls=(call,)), calls.place, position)
        later[call.id] -= 1
        own = answers.get(call.id, [])
        # Ids that are there twice have a result each.
        count = 1 if later[call.id] else len(own)
        yield from own[:count]
        answers[call.id] = own[count:]
        # What was said and thought came before the first call.
        turn = msgspec.structs.replace(turn, content=None, reasoning=None)
    for others in answers.values():
        yield from others


def _message(given: _Given, style: MessageStyle, limits: JsonLimits) -> dict[str, Any]:
    turn = given.turn
    message: dict[str, Any] = {"role": "system" if turn.role == "developer" else turn.role}
    content = "" if turn.content is None and style.no_content is NoContent.EMPTY else turn.content
    if content is not None:
        message["content"] = [{"type": "text", "text": content}] if style.parts else content
    elif style.no_content is NoContent.NONE:
        message["content"] = None
    if turn.name is not None:
        message["name"] = turn.name
    if turn.reasoning is not None:
        # gpt-oss reads it as `thinking`; transformers gives both names too.
        message["reasoning_content"] = message["thinking"] = turn.reasoning
        if style.reads_reasoning:
            message["reasoning"] = turn.reasoning
    if turn.tool_calls:
        calls = []
        for position, call in enumerate(turn.tool_calls, given.position):
            param = f"messages.{given.place}.tool_calls.{position}.function.arguments"
            function = {"name": call.name, "arguments": _arguments(call.arguments, style, param, limits)}
            calls.append({"id": call.id, "type": "function", "function": function})
        message["tool_calls"] = calls
    if turn.tool_call_id is not None:
        message["tool_call_id"] = turn.tool_call_id
    return message


def _arguments(text: str, style: MessageStyle, param: str, limits: JsonLimits) -> str | dict[str, Any]:
    """Return a call's arguments as a template takes them.

    Any text does, since a model's answer may have been cut. Text that is no JSON object stays text or, in a
    template that walks an object, becomes the one value of INVALID_ARGUMENTS. Empty arguments and `null` are
    an empty object.
    """
    if not text.strip():
        return "{}" if style.text_arguments else {}
    value = json_or_none(text, param=param, limits=limits)
    if style.text_arguments:
        return text
    if isinstance(value, dict):
        return value
    if text.strip() == "null":
        return {}
    return text if style.takes_any_arguments else {INVALID_ARGUMENTS: text}
