"""The options of `vllm serve`. Pure."""

from __future__ import annotations

from catenary.migration.serve.parse import GROUPS, OPTIONS, UnknownOptionError, parse_serve
from catenary.migration.serve.rows import Kind, ServeOption

__all__ = ["GROUPS", "OPTIONS", "Kind", "ServeOption", "UnknownOptionError", "parse_serve"]
