"""Which parser the answers to a chat need, and what its tools constrain them to."""

from __future__ import annotations

from catenary.text import TokenizerTraits
from catenary.v1.common_pb2 import CONSTRAINT_KIND_JSON_SCHEMA
from gateway.constraints.structured import wanted_of
from gateway.constraints.tools import CallableFunction, own_calls, wanted_calls
from gateway.constraints.wanted import Wanted
from gateway.errors import bad_request
from gateway.generation.legacy_calls import with_tools
from gateway.parsing.choice import ParserChoice
from gateway.parsing.formats import JSON as JSON_FORMAT
from gateway.parsing.response_template import NAME as RESPONSE_TEMPLATE
from gateway.parsing.response_template import TemplateFormats, read_response_template
from gateway.parsing.toolset import ToolSet
from gateway.schemas.calls import CallMode
from gateway.schemas.chat import ChatRequest
from gateway.schemas.tools import FunctionTool

_NO_TOOLS = "The model's chat template knows no tools, and the server was started without --tool-parser."
_UNKNOWN_FORMAT = (
    "The format in which this model writes tool calls is not known: start the server with --tool-parser "
    "NAME, or require a call with 'tool_choice'."
)


def choose_parser(fields: ChatRequest, traits: TokenizerTraits) -> ParserChoice:
    """The parser for the answers to a request. Raises ApiError if calls cannot be told from text."""
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
    """What an answer is constrained to: required and strict calls, or what else the request asks for.

    An answer without calls is what a JSON schema says; where a call is required, there is no such answer.
    Raises ApiError for any other combination."""
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
    """The model's parsers for calls and for reasoning. Its response template, if it is understood, has the
    first word on what it describes."""
    found = read_response_template(traits.response_template) if traits.response_template else None
    formats = found or TemplateFormats()
    return (
        traits.tool_parser if formats.tools is None else RESPONSE_TEMPLATE,
        traits.reasoning_parser if formats.reasoning is None else RESPONSE_TEMPLATE,
        formats,
    )


def _tool_parser(own: str, fields: ChatRequest, traits: TokenizerTraits) -> str:
    """The model's own, or the one for calls as a constraint has them written where it cannot hold the model's
    own to their schemas."""
    mode = fields.call_policy.mode
    if mode is CallMode.NONE:
        return ""
    if mode is CallMode.REQUIRED:
        return JSON_FORMAT.name if own_calls(_callable(fields), own, required=True) is None else own
    if not own:
        raise bad_request(
            _UNKNOWN_FORMAT if traits.reads_tools else _NO_TOOLS, fields.tools_param, "unsupported_parameter"
        )
    # What a template of the request's own shows is its author's business.
    if not traits.reads_tools and fields.chat_template is None:
        raise bad_request(
            "The model's chat template does not show tools to the model; serve it with one that does, "
            "or require a call with 'tool_choice'.",
            fields.tools_param,
            "unsupported_parameter",
        )
    return own
