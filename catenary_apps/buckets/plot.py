"""A heat map for each strategy: where decode steps lie, and where the buckets end."""

from __future__ import annotations

import math
from collections import Counter

from catenary_apps.buckets.compare import Comparison, Verdict
from catenary_apps.cli.drawing import Canvas, Colour, PngCanvas, SvgCanvas

_CELLS = 64, 40
_PANEL = 448, 280
_MARGIN = 46
_TITLE = 34
_WIDTH = _PANEL[0] + 2 * _MARGIN
_HEIGHT = _PANEL[1] + _TITLE + _MARGIN
_INK: Colour = (40, 40, 40)
_GRID: Colour = (244, 244, 244)
_BUCKET: Colour = (20, 60, 160)
_COLD: Colour = (255, 236, 200)
_HOT: Colour = (200, 30, 20)


def draw(comparison: Comparison, suffix: str) -> bytes:
    """The plot as a file with this suffix, .svg or .png.

    Cells are the real sizes of decode steps, redder where steps are more frequent (on a logarithmic scale);
    marks are the buckets. Both plots of a comparison have the same axes, which end where the steps do.
    """
    columns = min(2, len(comparison.verdicts))
    rows = -(-len(comparison.verdicts) // columns)
    size = columns * _WIDTH, rows * _HEIGHT
    canvas: Canvas = PngCanvas(*size) if suffix == ".png" else SvgCanvas(*size)
    shapes = [shape for v in comparison.verdicts.values() for shape, _ in v.assessment.trace.decode]
    most_blocks = max((shape.context_blocks for shape in shapes), default=1)
    most_rows = max((shape.batch for shape in shapes), default=1)
    for index, (name, verdict) in enumerate(comparison.verdicts.items()):
        left = (index % columns) * _WIDTH + _MARGIN
        top = (index // columns) * _HEIGHT + _TITLE
        _panel(canvas, left, top, name, verdict, most_blocks=most_blocks, most_rows=most_rows)
    return canvas.finish()


def _panel(
    canvas: Canvas, left: int, top: int, name: str, verdict: Verdict, *, most_blocks: int, most_rows: int
) -> None:
    width, height = _PANEL
    across, up = min(_CELLS[0], most_blocks + 1), min(_CELLS[1], most_rows + 1)
    found = verdict.assessment
    canvas.text(
        left,
        top - 26,
        f"{name}: {found.graphs} graphs, padding rows {found.decode_row_padding:.1%} "
        f"blocks {found.decode_block_padding:.1%}",
        _INK,
    )
    canvas.box(left, top, width, height, _GRID)
    cells: Counter[tuple[int, int]] = Counter()
    for (shape, _), count in found.trace.decode.items():
        column = shape.context_blocks * across // (most_blocks + 1)
        row = shape.batch * up // (most_rows + 1)
        cells[column, row] += count
    hottest = math.log1p(max(cells.values(), default=1))
    for (column, row), count in sorted(cells.items()):
        x, y = left + column * width / across, top + height - (row + 1) * height / up
        canvas.box(x, y, width / across, height / up, _shade(math.log1p(count) / hottest))
    for bucket in verdict.plan.decode:
        if bucket.context_blocks <= most_blocks and bucket.batch <= most_rows:
            x = left + (bucket.context_blocks + 0.5) * width / (most_blocks + 1)
            y = top + height - (bucket.batch + 0.5) * height / (most_rows + 1)
            canvas.box(x - 1.5, y - 1.5, 3, 3, _BUCKET)
    canvas.text(left, top + height + 6, "0", _INK)
    canvas.text(left + width - 8 * len(str(most_blocks)), top + height + 6, str(most_blocks), _INK)
    canvas.text(left + width / 2 - 80, top + height + 6, "kv blocks of a decode step", _INK)
    canvas.text(left - 8 * len(str(most_rows)) - 2, top, str(most_rows), _INK)
    canvas.text(left - 40, top + height / 2, "rows", _INK)


def _shade(heat: float) -> Colour:
    red, green, blue = (round(cold + (hot - cold) * heat) for cold, hot in zip(_COLD, _HOT, strict=True))
    return red, green, blue
