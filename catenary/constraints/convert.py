"""From a constraint to the grammar that llguidance compiles."""

from __future__ import annotations

import json
from collections.abc import Mapping

from llguidance import regex_to_lark

from catenary.constraints.gbnf import gbnf_to_lark, is_gbnf
from catenary.constraints.json_schema import read_schema
from catenary.constraints.kinds import ConstraintError, ConstraintKind, ConstraintLimits
from catenary.constraints.lark import read_lark
from catenary.constraints.regex import check_regex
from catenary.constraints.structural_tag import tags_to_lark

DEFAULT_LIMITS = ConstraintLimits()


def to_llguidance(
    kind: ConstraintKind,
    source: str,
    limits: ConstraintLimits = DEFAULT_LIMITS,
    control: Mapping[str, int] | None = None,
) -> str:
    """The grammar of a constraint, for `llguidance.LLMatcher`. It never allows more than the constraint.

    Args:
        kind: what `source` is.
        source: as the comments of `catenary.v1.ConstraintKind` say.
        limits: sizes.
        control: ids of the model's control tokens by their text, which tags may begin and end with.

    Raises:
        ConstraintError: the source is malformed, too large, or asks for what cannot be honoured. Whether
            llguidance can compile the result, `check_grammar` says.
    """
    size = len(source.encode("utf-8", "surrogatepass"))
    if size > limits.max_bytes:
        raise ConstraintError(f"The constraint has {size} bytes; at most {limits.max_bytes} are allowed.")
    match kind:
        case ConstraintKind.JSON_SCHEMA:
            return _grammar({"json_schema": read_schema(source, limits)})
        case ConstraintKind.REGEX:
            check_regex(source, limits)
            return _grammar({"lark_grammar": f"start: {lark_regex(source)}"})
        case ConstraintKind.GRAMMAR:
            lark = gbnf_to_lark(source, limits) if is_gbnf(source) else read_lark(source, limits)
            return _grammar({"lark_grammar": lark})
        case ConstraintKind.STRUCTURAL_TAG:
            return _grammar({"lark_grammar": tags_to_lark(source, limits, control or {})})


def lark_regex(regex: str) -> str:
    """A regular expression as Lark writes one.

    Digits and word characters are those of ASCII, as in JSON schemas: what `\\d+` allows is a number to all.
    """
    return f"/{regex_to_lark(regex, 'dw')}/"


def _grammar(body: dict[str, object]) -> str:
    return json.dumps({"grammars": [body]}, ensure_ascii=False)
