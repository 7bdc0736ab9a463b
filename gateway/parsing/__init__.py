"""From a model's text to content, reasoning and tool calls."""

from __future__ import annotations

from gateway.parsing.choice import REASONING_PARSERS, TOOL_PARSERS, ParserChoice, id_style
from gateway.parsing.events import (
    Content,
    Part,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
)
from gateway.parsing.formats import JSON as JSON_FORMAT
from gateway.parsing.output import IdStyle
from gateway.parsing.parser import TextParser
from gateway.parsing.response_template import NAME as RESPONSE_TEMPLATE
from gateway.parsing.response_template import TemplateFormats, read_response_template
from gateway.parsing.schema_types import parameter_types, to_json
from gateway.parsing.stops import ContentStops
from gateway.parsing.tags import TaggedFormat, tag_for, tagged_for, value_begin
from gateway.parsing.toolset import NAME, ToolSet

__all__ = [
    "JSON_FORMAT",
    "NAME",
    "REASONING_PARSERS",
    "RESPONSE_TEMPLATE",
    "TOOL_PARSERS",
    "Content",
    "ContentStops",
    "IdStyle",
    "ParserChoice",
    "Part",
    "Reasoning",
    "TaggedFormat",
    "TemplateFormats",
    "TextParser",
    "ToolCallArguments",
    "ToolCallStart",
    "ToolSet",
    "id_style",
    "parameter_types",
    "read_response_template",
    "tag_for",
    "tagged_for",
    "to_json",
    "value_begin",
]
