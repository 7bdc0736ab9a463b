"""The tables as text for docs/migration.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from catenary_apps.migration.letters import R1_SCRIPT, SCRIPT
from catenary_apps.migration.serve import SERVE_OPTIONS
from services.engine.vllm_variables import (
    Row,
    absent,
    buckets,
    cpu,
    execution,
    hpu,
    memory,
    serving,
)

_SECTIONS: Final[Mapping[str, Sequence[Row]]] = {
    "Variables: buckets": buckets.ROWS,
    "Variables: memory, graphs and long contexts": memory.ROWS,
    "Variables: warm-up, execution, logs and profiles": execution.ROWS,
    "Variables: a CPU": cpu.ROWS,
    "Variables: the Gaudi device": hpu.ROWS,
    "Variables: server and model sources": serving.ROWS,
    "Variables with nothing to do": absent.ROWS,
    "Options of `vllm serve`": [option.row for option in SERVE_OPTIONS],
    "Letters of `start_gaudi_vllm_server.sh`": [entry.row for entry in SCRIPT],
    "Letters of the DeepSeek-R1 script (`--r1`)": [entry.row for entry in R1_SCRIPT],
}
_COLUMNS: Final = {"Variables": "variable", "Options": "option", "Letters": "letter"}


def tables_markdown() -> str:
    """Return one table for each group of variables, options and letters. Each ends with a line break."""
    return "\n".join(
        section(title, _COLUMNS[title.partition(" ")[0].rstrip(":")], rows)
        for title, rows in _SECTIONS.items()
    )


def section(title: str, column: str, rows: Iterable[Row]) -> str:
    """Return a heading and a table; `column` says what the rows are."""
    head = f"## {title}\n\n| {column} | status | here | shown by |\n| --- | --- | --- | --- |\n"
    return head + "".join(f"{_line(row)}\n" for row in rows)


def _line(row: Row) -> str:
    names = ", ".join(f"`{name}`" for name in row.names)
    test = f"`{row.test.rsplit('/', 1)[-1]}`" if row.test else ""
    cells = (names, row.status.value, row.note, test)
    safe = (cell.replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(safe)} |"
