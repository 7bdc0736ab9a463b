"""Results as lines and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.text import Text

from catenary_apps.cli.output import counted
from catenary_apps.doctor.result import Result, Status

_STYLES = {
    Status.OK: ("ok", "green"),
    Status.WARNING: ("warning", "yellow"),
    Status.PROBLEM: ("PROBLEM", "bold red"),
    Status.NOT_APPLICABLE: ("-", "dim"),
}


def as_json(results: Sequence[Result]) -> str:
    """One JSON object."""
    checks = [{**asdict(result), "status": result.status.value} for result in results]
    return json.dumps({"checks": checks, "summary": _counts(results)}, indent=2)


def show(results: Sequence[Result], console: Console, *, hidden: bool = False) -> None:
    """A line for each check, and one below with what to do. hidden: without those that do not apply, but for
    the first, which says whether there are cards."""
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
