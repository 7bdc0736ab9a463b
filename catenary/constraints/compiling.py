"""Compiling a grammar with llguidance, and what it says when it cannot."""

from __future__ import annotations

import re

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from catenary.constraints.kinds import ConstraintError

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
    """What llguidance may spend on a constraint; the check and the engines use the same."""
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
    """llguidance's message as one line of our own."""
    keyword = _KEYWORDS.search(message)
    if keyword is not None:
        return f"The JSON schema uses '{keyword[1]}', which is not supported."
    found = _PLACE.search(message)
    place = "" if found is None else f" (line {found[1]}, column {found[2]})"
    for part, meaning in _MEANINGS:
        if part in message:
            return meaning.format(place=place)
    return f"The constraint cannot be compiled{place}."
