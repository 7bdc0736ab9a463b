"""The programs that a person starts: the command line, `up`, `LLM`, and the tools."""

from __future__ import annotations
