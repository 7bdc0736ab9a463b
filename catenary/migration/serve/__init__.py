"""The options of `vllm serve`. Pure."""

from __future__ import annotations

from catenary.migration.serve.parse import OPTIONS, parse_serve
from catenary.migration.serve.rows import Kind, ServeOption

__all__ = ["OPTIONS", "Kind", "ServeOption", "parse_serve"]
