"""The results of checks, printed as lines and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import TYPE_CHECKING

from catenary_apps.cli.output import counted

if TYPE_CHECKING:
    from rich.console import Console


class Status(Enum):
    """OK and NOT_APPLICABLE need nothing; a WARNING costs speed or some use; a PROBLEM keeps engines down."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"
    NOT_APPLICABLE = "not applicable"


@dataclass(frozen=True, slots=True)
class Result:
    """`found` and `advice` (what to do, empty if nothing) are one line each; `check` is the check's name."""

    status: Status
    found: str
    advice: str = ""
    check: str = ""


def ok(found: str) -> Result:
    return Result(Status.OK, found)


def warning(found: str, advice: str) -> Result:
    """Return a finding that costs speed or safety, but stops nothing."""
    return Result(Status.WARNING, found, advice)


def problem(found: str, advice: str) -> Result:
    """Return a finding that keeps an engine from running on these cards."""
    return Result(Status.PROBLEM, found, advice)


def not_applicable(found: str) -> Result:
    """Return that there is nothing to check, and why."""
    return Result(Status.NOT_APPLICABLE, found)


_STYLES = {
    Status.OK: ("ok", "green"),
    Status.WARNING: ("warning", "yellow"),
    Status.PROBLEM: ("PROBLEM", "bold red"),
    Status.NOT_APPLICABLE: ("-", "dim"),
}


def as_json(results: Sequence[Result]) -> str:
    checks = [{"check": one.check, **asdict(one), "status": one.status.value} for one in results]
    return json.dumps({"checks": checks, "summary": _counts(results)}, indent=2)


def show(results: Sequence[Result], console: Console, *, hidden: bool = False) -> None:
    """Print a line for each check, and one below with what to do.

    `hidden` leaves out those that do not apply, but for the first, which says whether there are cards.
    """
    # Here and not above: JSON needs none of it.
    from rich.text import Text

    shown = [
        result
        for number, result in enumerate(results)
        if not hidden or number == 0 or result.status is not Status.NOT_APPLICABLE
    ]
    width = max(len(result.check) for result in shown)
    for result in shown:
        word, style = _STYLES[result.status]
        line = Text(f"{word:<9}", style=style) + Text(f"{result.check:<{width}}  {result.found}")
        console.print(line, soft_wrap=True)
        if result.advice:
            console.print(Text(f"{'':<9}{'':<{width}}  -> {result.advice}"), soft_wrap=True)
    counts = _counts(results)
    summary = ", ".join(counted(counts[noun], noun) for noun in ("problem", "warning"))
    if left := len(results) - len(shown):
        summary += f"; {counted(left, 'check')} not shown, which do not apply here (--all shows them)"
    console.print(summary, highlight=False, soft_wrap=True)


def _counts(results: Sequence[Result]) -> dict[str, int]:
    found = Counter(result.status for result in results)
    return {status.value: found[status] for status in Status}
