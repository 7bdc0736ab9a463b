"""What the text of a sequence must be: grammars, and which tokens they allow next. Pure: no device."""

from __future__ import annotations

from services.engine.constraints.constraints import ConstraintCompiler, Constraints
from services.engine.constraints.guidance import GuidanceBackend
from services.engine.constraints.restriction import CompiledConstraint, Restriction, Taken
from services.engine.constraints.vocabulary import (
    Bits,
    ConstraintRefused,
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
    "Constraints",
    "GuidanceBackend",
    "Restriction",
    "Taken",
    "Vocabulary",
    "VocabularyError",
    "open_xgrammar",
    "read_vocabulary",
]
