"""Limits of a request that an operator sets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Counts, and a length in characters for stop strings."""

    max_n: int = 16
    max_prompts: int = 128
    max_sequences: int = 256
    max_messages: int = 4096
    max_content_parts: int = 16384
    max_stop_length: int = 512
    max_stop_token_ids: int = 64
