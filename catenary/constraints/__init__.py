"""Constraints of a generated text: JSON of a schema, a regular expression, a grammar or free text with tags.

The tokenizer service compiles a constraint before a request is admitted, an engine compiles it again to
generate under it. Both come here, so that what the one accepts is what the other does. Needs llguidance; no
torch.
"""

from __future__ import annotations

from catenary.constraints.control_tokens import control_tokens
from catenary.constraints.convert import DEFAULT_LIMITS, check_grammar, explain, parser_limits, to_llguidance
from catenary.constraints.json_schema import clean_schema, read_schema
from catenary.constraints.kinds import ConstraintError, ConstraintKind, ConstraintLimits
from catenary.constraints.regex import read_regex
from catenary.constraints.structural_tag import TAG_GAP, first_to_fire

__all__ = [
    "DEFAULT_LIMITS",
    "TAG_GAP",
    "ConstraintError",
    "ConstraintKind",
    "ConstraintLimits",
    "check_grammar",
    "clean_schema",
    "control_tokens",
    "explain",
    "first_to_fire",
    "parser_limits",
    "read_regex",
    "read_schema",
    "to_llguidance",
]
