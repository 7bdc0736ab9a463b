"""The options of `vllm serve`. Pure."""

from __future__ import annotations

from catenary_apps.migration.serve.parse import GROUPS, OPTIONS, UnknownOptionError, parse_serve
from catenary_apps.migration.serve.rows import Kind, ServeOption

__all__ = ["GROUPS", "OPTIONS", "Kind", "ServeOption", "UnknownOptionError", "parse_serve"]
