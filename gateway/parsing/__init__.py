"""From a model's text to content, reasoning and tool calls."""

from __future__ import annotations

from gateway.parsing.events import (
    Content,
    OutputParser,
    Part,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
)

__all__ = ["Content", "OutputParser", "Part", "Reasoning", "ToolCallArguments", "ToolCallStart"]
