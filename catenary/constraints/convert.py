"""Convert a constraint to the grammar that llguidance compiles, and check that it compiles."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark

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
    """Return the grammar of a constraint, for `llguidance.LLMatcher`. It allows no more than the constraint.

    Args:
        kind: the form of `source`.
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
    """Return a regular expression as Lark writes one.

    Digits and word characters are those of ASCII, as in JSON schemas: what `\\d+` allows is a number to all.
    """
    return f"/{regex_to_lark(regex, 'dw')}/"


# The parts of llguidance's messages that have a meaning for callers, and the same in our words.
_KEYWORDS = re.compile(r'Unimplemented keys: \["([A-Za-z0-9_$-]{1,64})"')
_PLACE = re.compile(r"(?:^|at )([0-9]{1,9})\(([0-9]{1,9})\)")
_MEANINGS = (
    (
        "oneOf constraints",
        "The JSON schema's 'oneOf' has members that are not clearly disjoint; use 'anyOf'.",
    ),
    (
        "min/maxProperties",
        "The JSON schema's 'minProperties' and 'maxProperties' need all 'properties' to be required.",
    ),
    (
        "patternProperty regexes",
        "The JSON schema's 'patternProperties' have patterns that may match the same name.",
    ),
    ("for integer range", "The JSON schema's 'minimum' and 'maximum' cannot be honoured."),
    ("for number range", "The JSON schema's 'minimum' and 'maximum' cannot be honoured."),
    ("multipleOf", "The JSON schema's 'multipleOf' cannot be honoured."),
    ("Unsatisfiable", "The JSON schema allows no value."),
    ("schema too large", "The JSON schema's 'allOf' has too many combinations."),
    ("in regex", "A regular expression is not valid, or has an anchor inside."),
    ("regex parse error", "The JSON schema's 'pattern' is not a valid regular expression."),
    ("lookarounds", "The JSON schema's 'pattern' has an anchor inside."),
    ("no start rule", "The grammar has no rule 'start' (Lark) or 'root' (GBNF)."),
    ("unknown name", "The grammar uses a name that it does not define{place}."),
    ("unknown special token", "The grammar uses a control token that the model does not have{place}."),
    ("circular reference", "The grammar has a token that is defined by itself{place}."),
    ("duplicate", "The grammar defines a name twice{place}."),
    ("too big", "The constraint is too complex."),
    ("too deeply nested", "The grammar is nested too deep."),
    ("NoExtension", "The constraint allows no text."),
)


def parser_limits() -> LLParserLimits:
    """Return llguidance's limits of resources for a constraint, the same in the check and the engines."""
    return LLParserLimits(verbose_errors=False)


def check_grammar(grammar: str, tokenizer: LLTokenizer) -> None:
    """Compile a result of `to_llguidance` and take its first step.

    Raises:
        ConstraintError: llguidance cannot, or nothing can be generated.
    """
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
    if matcher.is_error():
        raise ConstraintError(explain(matcher.get_error()))
    allowed = matcher.compute_logit_bias()
    if matcher.is_error():
        raise ConstraintError(explain(matcher.get_error()))
    if not any(allowed):
        raise ConstraintError("The constraint allows no text.")


def explain(message: str) -> str:
    """Return llguidance's message as one line of our own."""
    keyword = _KEYWORDS.search(message)
    if keyword is not None:
        return f"The JSON schema uses '{keyword[1]}', which is not supported."
    found = _PLACE.search(message)
    place = "" if found is None else f" (line {found[1]}, column {found[2]})"
    for part, meaning in _MEANINGS:
        if part in message:
            return meaning.format(place=place)
    return f"The constraint cannot be compiled{place}."
