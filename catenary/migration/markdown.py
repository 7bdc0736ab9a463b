"""The tables as text for docs/migration.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from catenary.migration import absent, buckets, execution, memory, serving
from catenary.migration.rows import Row

_SECTIONS: Final[Mapping[str, Sequence[Row]]] = {
    "Buckets": buckets.ROWS,
    "Memory, graphs and long contexts": memory.ROWS,
    "Warm-up, execution, logs and profiles": execution.ROWS,
    "Server and model sources": serving.ROWS,
    "Nothing to do": absent.ROWS,
}


def tables_markdown() -> str:
    """One table for each group of variables. Each ends with a line break."""
    return "\n".join(section(title, "variable", rows) for title, rows in _SECTIONS.items())


def section(title: str, column: str, rows: Iterable[Row]) -> str:
    """A heading and a table; `column` says what the rows are."""
    head = f"## {title}\n\n| {column} | status | here | shown by |\n| --- | --- | --- | --- |\n"
    return head + "".join(f"{_line(row)}\n" for row in rows)


def _line(row: Row) -> str:
    names = ", ".join(f"`{name}`" for name in row.names)
    test = f"`{row.test.rsplit('/', 1)[-1]}`" if row.test else ""
    cells = (names, row.status.value, row.note, test)
    safe = (cell.replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(safe)} |"
