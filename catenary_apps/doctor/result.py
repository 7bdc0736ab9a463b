"""What a check found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Status(Enum):
    """OK and NOT_APPLICABLE need nothing; a WARNING costs speed or some use; a PROBLEM keeps engines down."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"
    NOT_APPLICABLE = "not applicable"


@dataclass(frozen=True, slots=True)
class Result:
    """`found` and `advice` (what to do, empty if nothing) are one line each."""

    check: str
    status: Status
    found: str
    advice: str = ""


def ok(check: str, found: str) -> Result:
    """All is well."""
    return Result(check, Status.OK, found)


def warning(check: str, found: str, advice: str) -> Result:
    """It works, but not as well as it could."""
    return Result(check, Status.WARNING, found, advice)


def problem(check: str, found: str, advice: str) -> Result:
    """An engine will not run on these cards."""
    return Result(check, Status.PROBLEM, found, advice)


def not_applicable(check: str, found: str) -> Result:
    """There is nothing to check."""
    return Result(check, Status.NOT_APPLICABLE, found)
