"""Kinds of constraints, their limits, and why one is refused."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from catenary.sequence_limits import MAX_CONSTRAINT_BYTES


class ConstraintKind(IntEnum):
    """The values of `catenary.v1.ConstraintKind`, whose comments say what each source is."""

    JSON_SCHEMA = 1
    REGEX = 2
    GRAMMAR = 3
    STRUCTURAL_TAG = 4
    GBNF = 5


class ConstraintError(ValueError):
    """The constraint cannot be honoured. The text is one line of our own words, for the caller."""


@dataclass(frozen=True, slots=True)
class ConstraintLimits:
    """Sizes up to which a constraint is looked at; a larger one is refused. They keep llguidance, whose
    recursion has no limit of its own, within a thread's stack of 8 MiB.

    Attributes:
        max_bytes: of the source in UTF-8.
        max_depth: nesting of JSON values, and of groups in grammars and regular expressions.
        max_nodes: JSON values of a schema.
        max_properties: of one object in a schema.
        max_patterns: of one patternProperties, each pair of which is compared.
        max_alternatives: values of one enum, members of one anyOf.
        max_reference_depth: schemas on the longest way through $ref, each recursion counted once.
        max_regex_size: characters that a regular expression stands for when its repetitions are written out.
        max_rules: of a grammar.
        max_tags: structures of a tag, and triggers.
        max_tag_chars: characters of the beginning of a structure, and of its end.
        max_whitespace: characters of white space between two JSON tokens.
        max_digits: of a number in a text of a format: of the fractions of a time's seconds, and of each part
            of a duration.
        closed_objects: objects that list their properties, and say nothing of others, have no others.
    """

    max_bytes: int = MAX_CONSTRAINT_BYTES
    max_depth: int = 64
    max_nodes: int = 20_000
    max_properties: int = 1000
    max_patterns: int = 16
    max_alternatives: int = 2000
    max_reference_depth: int = 512
    max_regex_size: int = 20_000
    max_rules: int = 500
    max_tags: int = 256
    max_tag_chars: int = 1024
    max_whitespace: int = 32
    max_digits: int = 40
    closed_objects: bool = False
