"""What is to be done about a failure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from catenary.resume.failure import Cause
from catenary.v1 import common_pb2


@dataclass(frozen=True, slots=True)
class Again:
    """Submit `Resumable.spec()` after `delay_s` seconds; by the clock's time `until`, or not at all."""

    cause: Cause
    delay_s: float
    until: float


@dataclass(frozen=True, slots=True)
class Finished:
    """Nothing is missing: its last token was there, and only the word that it is the last one was lost."""

    end: common_pb2.SequenceEnd


@dataclass(frozen=True, slots=True)
class GivenUp:
    """It was tried for long enough, or harms engines."""

    cause: Cause
    error: common_pb2.Error


@dataclass(frozen=True, slots=True)
class Passed:
    """Its reader gets this error: trying again does not mend it."""

    error: common_pb2.Error


Verdict: TypeAlias = Again | Finished | GivenUp | Passed
