"""Constraints on a sequence's text: grammars, and the tokens that they allow next. Pure: no device."""

from __future__ import annotations

from services.engine.constraints.compiler import ConstraintCompiler
from services.engine.constraints.guidance import GuidanceBackend
from services.engine.constraints.restriction import CompiledConstraint, Restriction, Taken
from services.engine.constraints.vocabulary import (
    Bits,
    ConstraintRefused,
    Matcher,
    Vocabulary,
    VocabularyError,
    read_vocabulary,
)
from services.engine.constraints.xgrammar import open_xgrammar

__all__ = [
    "Bits",
    "CompiledConstraint",
    "ConstraintCompiler",
    "ConstraintRefused",
    "GuidanceBackend",
    "Matcher",
    "Restriction",
    "Taken",
    "Vocabulary",
    "VocabularyError",
    "open_xgrammar",
    "read_vocabulary",
]
