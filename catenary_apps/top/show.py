"""Draws a frame."""

from __future__ import annotations

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from catenary_apps.top.cells import Cells, engine_cells, lane_cells, router_lines, total_line
from catenary_apps.top.frame import Frame

_NUMBERS = frozenset(
    {"run", "wait", "placed", "tok/s", "hits", "age", "queued", "tokens", "oldest", "live", "refused"}
    | {"timed out"}
)


def draw(frame: Frame, console: Console, *, height: int | None = None) -> Group:
    """A frame for this console. `height`: lines that it may have; engines that find no room are counted."""
    width = console.width
    lines = [
        Text(line, style="bold red" if marked else "", no_wrap=True, overflow="ellipsis")
        for line, marked in router_lines(frame)
    ]
    lanes = _table(lane_cells(frame, width))
    engines = engine_cells(frame, width, ascii_only=console.options.ascii_only)
    hidden = 0
    if height is not None:
        room = max(1, height - len(lines) - lanes.row_count - 6)
        hidden = max(0, len(engines.rows) - room)
        # What asks for attention is shown first where not all can be.
        order = sorted(range(len(engines.rows)), key=lambda place: not engines.marked[place])
        if hidden:
            kept = sorted(order[:room])
            engines = Cells(
                engines.header,
                tuple(engines.rows[place] for place in kept),
                tuple(engines.marked[place] for place in kept),
            )
    total = Text(total_line(frame), style="bold", no_wrap=True, overflow="ellipsis")
    parts: list[Text | Table] = [*lines, total, Text(), _table(engines)]
    if hidden:
        parts.append(Text(f"and {hidden} more", style="dim"))
    if frame.lanes:
        parts += [Text(), lanes]
    return Group(*parts)


def _table(cells: Cells) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for name in cells.header:
        table.add_column(name, justify="right" if name in _NUMBERS else "left", no_wrap=True)
    for row, marked in zip(cells.rows, cells.marked, strict=True):
        table.add_row(*(Text(cell) for cell in row), style="yellow" if marked else None)
    return table
