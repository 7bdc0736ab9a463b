"""Sources of constraints as grammars of llguidance."""

from __future__ import annotations

import llguidance

from services.engine.constraints.matching import ConstraintRefused
from services.engine.link import ConstraintKind, ConstraintOptions


def guidance_source(options: ConstraintOptions) -> str:
    """Raises ConstraintRefused."""
    make = llguidance.LLMatcher
    match options.kind:
        case ConstraintKind.JSON_SCHEMA:
            return make.grammar_from_json_schema(
                options.source, overrides={"whitespace_pattern": r"[ \n]{0,8}"}
            )
        case ConstraintKind.REGEX:
            return make.grammar_from_regex(options.source)
        case ConstraintKind.GRAMMAR:
            return make.grammar_from_lark(options.source)
        case _:
            raise ConstraintRefused("Structural tags are not supported.")


def guidance_limits() -> llguidance.LLParserLimits:
    """Limits."""
    return llguidance.LLParserLimits(verbose_errors=False)
