"""Options of constrained output: what compiles grammars, and how much of that there may be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import BaseModel, Field


class GrammarOptions(BaseModel):
    """A part of the engine's options."""

    headings: ClassVar[Mapping[str, str]] = {
        "grammar_backend": "Structured output",
    }

    grammar_backend: Literal["llguidance", "xgrammar"] = Field(
        "llguidance",
        description="Library that matches tokens against grammars. xgrammar is an extra, and honours fewer "
        "JSON schemas.",
    )
    grammar_threads: int = Field(
        0,
        ge=0,
        le=256,
        description="Threads that compile constraints, and as many that fill the masks of a step. 0: half of "
        "the cores, at most 8.",
    )
    grammar_queue: int = Field(
        256,
        ge=1,
        le=100_000,
        description="Sequences that may wait until their constraints are compiled; more are refused.",
    )
    grammar_timeout_s: float = Field(
        10.0,
        gt=0,
        le=3_600,
        description="A sequence whose constraint is not compiled after so long is refused.",
    )
    grammar_number_digits: int = Field(
        40,
        ge=16,
        le=1_000_000,
        description="Most digits of a number in constrained JSON, before its point and behind it, so that a "
        "model cannot write digits for ever; also of a second's fraction in texts of the formats time and "
        "date-time, and of a duration's numbers. An exponent has at most 3.",
    )
    grammar_cache: int = Field(
        128, ge=0, le=100_000, description="Compiled constraints that are kept for the next that are equal."
    )
    grammar_cache_kib: int = Field(
        1024,
        ge=0,
        le=1 << 20,
        description="Most KiB of the texts that they were compiled from, together. What is made of a text is "
        "about a hundred times as large.",
    )
