"""Chats before they are rendered: messages, parser and constraint, cut to fit the context."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

import msgspec

from catenary.telemetry import new_id
from catenary.text import TokenizerTraits
from catenary.v1 import tokenizer_pb2
from catenary.v1.common_pb2 import CONSTRAINT_KIND_JSON_SCHEMA
from gateway.auth import Caller
from gateway.constraints import CallableFunction, Wanted, own_calls, wanted_calls, wanted_of
from gateway.errors import ApiError, bad_request
from gateway.generation.plan import Prepared
from gateway.parsing.choice import ParserChoice, id_style
from gateway.parsing.formats import JSON as JSON_FORMAT
from gateway.parsing.output import IdStyle
from gateway.parsing.response_template import NAME as RESPONSE_TEMPLATE
from gateway.parsing.response_template import TemplateFormats, read_response_template
from gateway.parsing.toolset import ToolSet
from gateway.schemas.chat import ChatInputFields, ChatMessage, ChatRequest, ToolCall
from gateway.schemas.tools import CallMode, FunctionTool
from gateway.text.models import Model
from gateway.text.target import Rendered


def with_tools(messages: Sequence[ChatMessage], tool_parser: str) -> Sequence[ChatMessage]:
    """Return the messages with calls and results of tools in place of those of functions, which have no ids.

    A result belongs to the last call of its function, or to the last call if there is none of it.
    `tool_parser`: of the model, whose template may ask for a certain form of ids."""
    if not any(message.function_call is not None or message.role == "function" for message in messages):
        return messages
    style = id_style(tool_parser)
    used: dict[str, str] = {}
    made = []
    for message in messages:
        if message.function_call is not None:
            name = message.function_call.name
            call = ToolCall(id=_new_id(style, name, used), function=message.function_call)
            used[call.id] = name
            message = message.model_copy(update={"function_call": None, "tool_calls": [call]})
        elif message.role == "function":
            name = message.name or ""
            call_id = next((found for found in reversed(used) if used[found] == name), None)
            call_id = call_id or next(reversed(used), None) or _new_id(style, name, used)
            message = message.model_copy(update={"role": "tool", "tool_call_id": call_id})
        else:
            used |= {call.id: call.function.name for call in message.tool_calls or ()}
        made.append(message)
    return made


def _new_id(style: IdStyle, name: str, used: dict[str, str]) -> str:
    if style is IdStyle.OWN:
        return style.make(name, "", used)
    # Nine letters and digits, which suit every template; the same for the same chat, for the prefix cache.
    number = len(used)
    while (made := f"call{number:05d}") in used:
        number += 1
    return made


def to_chat_input(fields: ChatInputFields, traits: TokenizerTraits) -> tokenizer_pb2.ChatInput:
    """Return the part of a request that its template sees. Raises ApiError for variables unknown to it."""
    variables = fields.template_variables(traits.template_variables)
    return tokenizer_pb2.ChatInput(
        messages=[_message(message) for message in with_tools(fields.messages, traits.tool_parser)],
        add_generation_prompt=fields.add_generation_prompt,
        continue_final_message=bool(fields.continue_final_message),
        add_special_tokens=fields.add_special_tokens,
        tools_json=fields.tools_json,
        documents_json=msgspec.json.encode(fields.documents).decode() if fields.documents else "",
        template_variables_json=msgspec.json.encode(variables).decode() if variables else "",
        chat_template=fields.chat_template,
    )


def _message(message: ChatMessage) -> tokenizer_pb2.ChatMessage:
    calls = [
        tokenizer_pb2.ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
        for call in message.tool_calls or ()
    ]
    return tokenizer_pb2.ChatMessage(
        role=message.role,
        content=[tokenizer_pb2.ContentPart(text=text) for text in message.texts],
        name=message.name,
        tool_calls=calls,
        tool_call_id=message.tool_call_id,
        reasoning=message.thoughts,
    )


_NO_TOOLS = "The model's chat template knows no tools, and the server was started without --tool-parser."
_UNKNOWN_FORMAT = (
    "The format in which this model writes tool calls is not known: start the server with --tool-parser "
    "NAME, or require a call with 'tool_choice'."
)


def choose_parser(fields: ChatRequest, traits: TokenizerTraits) -> ParserChoice:
    """Return the parser for the answers to a request. Raises ApiError if calls cannot be told from text."""
    policy = fields.call_policy
    restricted = policy.mode is CallMode.REQUIRED or set(policy.names) != fields.schemas.keys()
    tool_parser, reasoning_parser, template = _own(traits)
    return ParserChoice(
        tool_parser=_tool_parser(tool_parser, fields, traits),
        reasoning_parser=reasoning_parser,
        tools=ToolSet(fields.schemas, frozenset(policy.names) if restricted else None, policy.single),
        continues=bool(fields.continue_final_message),
        named=policy.named,
        required=policy.mode is CallMode.REQUIRED,
        shows_reasoning=fields.include_reasoning is not False,
        legacy=policy.legacy,
        taken=frozenset(
            call.id
            for message in with_tools(fields.messages, traits.tool_parser)
            for call in message.tool_calls or ()
        ),
        template=template,
    )


def choose_constraint(fields: ChatRequest, traits: TokenizerTraits) -> Wanted | None:
    """Return the constraint of an answer: required and strict calls, or that of the request's other fields.

    A JSON schema constrains answers without calls; where a call is required, there is no such answer. Raises
    ApiError for any other combination."""
    policy, text = fields.call_policy, wanted_of(fields)
    if policy.mode is CallMode.NONE:
        return text
    required = policy.mode is CallMode.REQUIRED
    if text is not None and text.kind != CONSTRAINT_KIND_JSON_SCHEMA and not required:
        raise bad_request(
            f"'{text.param}' cannot be combined with tools that may be called; see 'tool_choice'.", text.param
        )
    return wanted_calls(
        _callable(fields),
        _own(traits)[0],
        required=required,
        single=policy.single,
        otherwise=text,
        param=fields.tools_param,
    )


def _callable(fields: ChatRequest) -> list[CallableFunction]:
    names = fields.call_policy.names
    return [
        CallableFunction(
            function.name,
            function.parameters,
            isinstance(function, FunctionTool) and function.strict is True,
        )
        for function in fields.offered
        if function.name in names
    ]


def _own(traits: TokenizerTraits) -> tuple[str, str, TemplateFormats]:
    """Return the model's parsers for calls and for reasoning. Its response template, if it is understood,
    takes precedence for the kinds that it describes."""
    found = read_response_template(traits.response_template) if traits.response_template else None
    formats = found or TemplateFormats()
    return (
        traits.tool_parser if formats.tools is None else RESPONSE_TEMPLATE,
        traits.reasoning_parser if formats.reasoning is None else RESPONSE_TEMPLATE,
        formats,
    )


def _tool_parser(own: str, fields: ChatRequest, traits: TokenizerTraits) -> str:
    """Return the model's own parser, or the one for calls as a constraint has them written where it cannot
    hold the model's own to their schemas."""
    mode = fields.call_policy.mode
    if mode is CallMode.NONE:
        return ""
    if mode is CallMode.REQUIRED:
        return JSON_FORMAT.name if own_calls(_callable(fields), own, required=True) is None else own
    if not own:
        raise bad_request(
            _UNKNOWN_FORMAT if traits.reads_tools else _NO_TOOLS, fields.tools_param, "unsupported_parameter"
        )
    # A template that the request brings may show anything: its author decides.
    if not traits.reads_tools and fields.chat_template is None:
        raise bad_request(
            "The model's chat template does not show tools to the model; serve it with one that does, "
            "or require a call with 'tool_choice'.",
            fields.tools_param,
            "unsupported_parameter",
        )
    return own


def prepare_chat(
    fields: ChatRequest,
    model: Model,
    caller: Caller,
    *,
    id_prefix: str = "chatcmpl-",
    prompt_param: str = "messages",
    drops_turns: bool = False,
) -> Prepared:
    """Prepare a chat; its answer is limited by the context alone, unless the request limits it.

    Raises ApiError if the model can neither see the tools nor be constrained as requested."""
    return Prepared(
        request_id=new_id(id_prefix),
        model=model,
        fields=fields,
        prompt=to_chat_input(fields, model.traits),
        prompt_param=prompt_param,
        caller=caller,
        drops_turns=drops_turns,
        parsing=choose_parser(fields, model.traits),
        wanted=choose_constraint(fields, model.traits),
    )


class Turn(Protocol):
    @property
    def role(self) -> str: ...


M = TypeVar("M", bound=Turn)

_KEPT = ("system", "developer")
_TOO_LONG = "context_length_exceeded"


def droppable(messages: Sequence[Turn]) -> list[list[int]]:
    """Return the indexes of messages that may be dropped, in groups, oldest first.

    First come whole turns: a user's message with all that follows up to the next one. Then, of the last turn,
    the rounds behind the user's message but the last: each an assistant's message with the results of its
    calls. Instructions are in none."""
    turns: list[list[int]] = [[]]
    for index, message in enumerate(messages):
        if message.role in _KEPT:
            continue
        if message.role == "user":
            turns.append([])
        turns[-1].append(index)
    *earlier, last = turns
    rounds: list[list[int]] = []
    for index in last:
        if messages[index].role == "user":
            continue
        if not rounds or messages[index].role == "assistant":
            rounds.append([])
        rounds[-1].append(index)
    return [turn for turn in earlier if turn] + rounds[:-1]


async def fitted(messages: Sequence[M], render: Callable[[list[M]], Awaitable[Rendered]]) -> Rendered:
    """Render a chat without as many of its oldest turns as needed to fit.

    Few attempts are rendered: their number is halved each time. `render` raises ApiError
    `context_length_exceeded` for a chat that is too long; if it does not fit without all droppable turns, the
    error for the whole chat is raised."""
    try:
        return await render(list(messages))
    except ApiError as error:
        if error.code != _TOO_LONG:
            raise
        whole = error
    parts = droppable(messages)
    found, most, least = None, len(parts), 1
    while least <= most:
        # The first time all go: a chat that is too long even then is the common one of those that never fit.
        count = most if found is None else (least + most) // 2
        gone = {index for part in parts[:count] for index in part}
        try:
            found = await render([message for index, message in enumerate(messages) if index not in gone])
        except ApiError as error:
            if error.code != _TOO_LONG:
                raise
            if found is None:
                break
            least = count + 1
        else:
            most = count - 1
    if found is None:
        raise whole
    return found
