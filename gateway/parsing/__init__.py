"""Parsing of a model's text into content, reasoning and tool calls."""
