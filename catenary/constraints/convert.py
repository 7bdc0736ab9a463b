"""From a constraint to the grammar that llguidance compiles."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

from llguidance import regex_to_lark

from catenary.constraints.gbnf import gbnf_to_lark
from catenary.constraints.json_schema import read_schema
from catenary.constraints.kinds import ConstraintError, ConstraintKind, ConstraintLimits
from catenary.constraints.lark import read_lark
from catenary.constraints.regex import read_regex
from catenary.constraints.structural_tag import tags_to_lark

DEFAULT_LIMITS = ConstraintLimits()

# Where only one text may follow, llguidance would allow only the tokens that the model's tokenizer makes of
# it. Those may be of another text: control tokens that it spells, or its characters in the tokenizer's
# normal form. The last such line of a grammar counts.
_OPTIONS = '%llguidance {"no_forcing": true}'


def to_llguidance(
    kind: ConstraintKind,
    source: str,
    limits: ConstraintLimits = DEFAULT_LIMITS,
    control: Mapping[str, int] | None = None,
    *,
    closed: bool = False,
) -> str:
    """The grammar of a constraint, for `llguidance.LLMatcher`. It never allows more than the constraint.

    Args:
        kind: what `source` is.
        source: as the comments of `catenary.v1.ConstraintKind` say.
        limits: sizes.
        control: ids of the model's control tokens by their text, which tags may begin and end with.
        closed: as `closed_objects` of `catenary.v1.Constraint`.

    Raises:
        ConstraintError: the source is malformed, too large, or asks for what cannot be honoured. Whether
            llguidance can compile the result, `check_grammar` says.
    """
    size = len(source.encode("utf-8", "surrogatepass"))
    if size > limits.max_bytes:
        raise ConstraintError(f"The constraint has {size} bytes; at most {limits.max_bytes} are allowed.")
    lark = _lark(kind, source, replace(limits, closed_objects=closed), control or {})
    return json.dumps({"grammars": [{"lark_grammar": f"{lark}\n{_OPTIONS}"}]})


def _lark(kind: ConstraintKind, source: str, limits: ConstraintLimits, control: Mapping[str, int]) -> str:
    match kind:
        case ConstraintKind.JSON_SCHEMA:
            return f"start: %json {json.dumps(read_schema(source, limits), ensure_ascii=False)}"
        case ConstraintKind.REGEX:
            return f"start: {lark_regex(read_regex(source, limits))}"
        case ConstraintKind.GRAMMAR:
            return read_lark(source, limits)
        case ConstraintKind.GBNF:
            return gbnf_to_lark(source, limits)
        case ConstraintKind.STRUCTURAL_TAG:
            return tags_to_lark(source, limits, control)


def lark_regex(regex: str) -> str:
    """A regular expression as Lark writes one.

    Digits and word characters are those of ASCII, as in JSON schemas: what `\\d+` allows is a number to all.
    """
    return f"/{regex_to_lark(regex, 'dw')}/"
