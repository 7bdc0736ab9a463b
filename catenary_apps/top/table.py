"""Draw a frame as tables for a terminal of a given width."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from catenary_apps.top.frame import EngineRow, Frame, LaneRow, share

_BAR = 10
# The first column may be cut down to so many characters before others are left out.
_LEAST_FIRST = 12
_GAP = 1

# The columns, and which of them go first where there is no room.
_ENGINES = (
    "engine", "model", "state", "role", "breaker", "run", "wait", "placed", "KV", "tok/s", "hits", "age",
)  # fmt: skip
_ENGINES_GO = ("model", "role", "placed", "age", "hits", "wait", "breaker", "KV", "run", "tok/s", "state")
_LANES = ("lane", "queued", "tokens", "oldest", "live", "refused", "timed out")
_LANES_GO = ("tokens", "timed out", "live", "oldest", "refused", "queued")


@dataclass(frozen=True, slots=True)
class Cells:
    """A table: its header, its rows, and of each row whether it asks for attention."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    marked: tuple[bool, ...]

    def fitting(self, width: int, leave_out: Sequence[str]) -> Cells:
        """Return as much as fits into `width` characters.

        Columns of `leave_out` are left out in that order, and the first column is cut.
        """
        keep = list(range(len(self.header)))
        widths = [max(map(len, column)) for column in zip(self.header, *self.rows, strict=True)]
        first = min(widths[0], _LEAST_FIRST)
        for name in leave_out:
            if first + sum(_GAP + widths[place] for place in keep[1:]) <= width:
                break
            keep.remove(self.header.index(name))
        room = max(1, width - sum(_GAP + widths[place] for place in keep[1:]))

        def kept(row: Sequence[str]) -> tuple[str, ...]:
            return (_cut(row[0], room), *(row[place] for place in keep[1:]))

        return Cells(kept(self.header), tuple(map(kept, self.rows)), self.marked)


def _cut(text: str, room: int) -> str:
    return text if len(text) <= room else text[: room - 1] + "…"


def clean(text: str) -> str:
    """Return a name from the wire for a terminal: control characters could steer it."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def bar(part: float | None, *, ascii_only: bool) -> str:
    """Return a share of 0 .. 1 as a bar and a number."""
    if part is None:
        return "-"
    full, empty = ("#", ".") if ascii_only else ("█", "░")
    filled = round(part * _BAR)
    return f"{full * filled}{empty * (_BAR - filled)} {part:4.0%}"


def number(value: float | None) -> str:
    """Return a count or a rate in at most five characters up to 10^15; `-` for an unknown one."""
    if value is None:
        return "-"
    for unit in ("", "k", "M", "G"):
        if value < 999.5:
            return f"{value:.1f}{unit}" if unit and value < 99.95 else f"{value:.0f}{unit}"
        value /= 1000
    return f"{value:.0f}T"


def seconds(value: float) -> str:
    """Return a span of time, short."""
    if value < 100:
        return f"{value:.1f}s"
    return f"{value / 60:.0f}m" if value < 6_000 else f"{value / 3_600:.0f}h"


def percent(value: float | None) -> str:
    """Return a share; `-` for that of nothing."""
    return "-" if value is None else f"{value:.0%}"


def engine_cells(frame: Frame, width: int, *, ascii_only: bool) -> Cells:
    """Return one row an engine; of engines that share a name the instance id is told, too."""
    names = Counter(engine.name for engine in frame.engines)
    rows = tuple(_engine(engine, names[engine.name] > 1, ascii_only) for engine in frame.engines)
    marked = tuple(engine.state != "serving" or engine.breaker != "closed" for engine in frame.engines)
    return Cells(_ENGINES, rows, marked).fitting(width, _ENGINES_GO)


def lane_cells(frame: Frame, width: int) -> Cells:
    """Return one row a lane."""
    rows = tuple(_lane(lane) for lane in frame.lanes)
    return Cells(_LANES, rows, tuple(lane.queued > 0 for lane in frame.lanes)).fitting(width, _LANES_GO)


def total_line(frame: Frame) -> str:
    """Return the whole fleet in one line."""
    engines = frame.engines
    serving = sum(engine.state == "serving" for engine in engines)
    used, blocks = (sum(engine.used_blocks for engine in engines), sum(e.total_blocks for e in engines))
    cached = sum(engine.cached_prompt_tokens for engine in engines)
    hits = share(cached, sum(engine.prompt_tokens for engine in engines))
    return ", ".join(
        (
            f"{serving} of {len(engines)} engines serve",
            f"{sum(engine.running for engine in engines)} running",
            f"{sum(engine.waiting for engine in engines)} waiting",
            f"{sum(lane.queued for lane in frame.lanes)} queued",
            f"KV {percent(share(used, blocks))}",
            f"{number(frame.tokens_per_s)} tok/s",
            f"prefix hits {percent(hits)}",
        )
    )


def router_lines(frame: Frame) -> list[tuple[str, bool]]:
    """Return a line for each router, and whether it asks for attention."""
    lines = []
    for router in frame.routers:
        if router.error is not None:
            lines.append((f"router {clean(router.address)}: away: {clean(router.error)}", True))
            continue
        state = "draining" if router.draining else "serving"
        said = f"{router.sessions} gateways, {router.live} sequences, {router.resumed} resumed"
        lines.append((f"router {clean(router.address)}: {state}, {said}", router.draining))
    return lines


def _engine(engine: EngineRow, ambiguous: bool, ascii_only: bool) -> tuple[str, ...]:
    name = f"{engine.name} {engine.instance_id[:8]}" if ambiguous else engine.name
    return (
        clean(name),
        clean(engine.model),
        engine.state,
        engine.role,
        engine.breaker,
        str(engine.running),
        str(engine.waiting),
        str(engine.placed),
        bar(share(engine.used_blocks, engine.total_blocks), ascii_only=ascii_only),
        number(engine.tokens_per_s),
        percent(share(engine.cached_prompt_tokens, engine.prompt_tokens)),
        seconds(engine.report_age_s),
    )


def _lane(lane: LaneRow) -> tuple[str, ...]:
    return (
        lane.priority_class,
        str(lane.queued),
        number(lane.queued_tokens),
        seconds(lane.oldest_wait_s),
        str(lane.live),
        str(lane.refused),
        str(lane.timed_out),
    )


_NUMBERS = frozenset(
    {"run", "wait", "placed", "tok/s", "hits", "age", "queued", "tokens", "oldest", "live", "refused"}
    | {"timed out"}
)


def draw(frame: Frame, console: Console, *, height: int | None = None) -> Group:
    """Return a frame for this console.

    `height`: lines that it may have; engines that find no room are counted.
    """
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
