"""The memory of a card as a bar."""

from __future__ import annotations

from catenary_apps.cli.drawing import Canvas, Colour, PngCanvas, SvgCanvas
from catenary_apps.plan.dividing import GIB
from catenary_apps.plan.planning import Planned

_SIZE = 900, 210
_MARGIN = 30
_BAR = 50, 60
_INK: Colour = (40, 40, 40)
_LEGEND_TOP = 125
_LEGEND_WIDTH = 280
_PARTS: tuple[tuple[str, Colour], ...] = (
    ("weights", (70, 90, 160)),
    ("largest prefill", (200, 120, 60)),
    ("graphs", (220, 180, 60)),
    ("kv", (70, 150, 90)),
    ("padding block", (150, 60, 60)),
    ("left free", (225, 225, 225)),
)


def draw(found: Planned, suffix: str) -> bytes:
    """The picture as a file with this suffix, .svg or .png: what takes how much of one card."""
    canvas: Canvas = PngCanvas(*_SIZE) if suffix == ".png" else SvgCanvas(*_SIZE)
    memory = found.memory
    pool = found.kv.num_blocks * found.block_bytes
    taken = memory.weights + memory.activations + memory.graphs + pool + found.block_bytes
    sizes = (
        memory.weights,
        memory.activations,
        memory.graphs,
        pool,
        found.block_bytes,
        max(0, memory.total - taken),
    )
    canvas.text(
        _MARGIN,
        20,
        f"{found.shape.name} on {found.config.tensor_parallel_size} x {found.card.name}: "
        f"{memory.total / GIB:.2f} gib, {found.kv.num_blocks} blocks of {found.limits.block_size} tokens",
        _INK,
    )
    left, width = float(_MARGIN), _SIZE[0] - 2 * _MARGIN
    for (_, colour), size in zip(_PARTS, sizes, strict=True):
        part = width * size / max(1, sum(sizes))
        if size:
            canvas.box(left, _BAR[0], part, _BAR[1], colour)
        left += part
    for index, ((name, colour), size) in enumerate(zip(_PARTS, sizes, strict=True)):
        x = _MARGIN + index % 3 * _LEGEND_WIDTH
        y = _LEGEND_TOP + index // 3 * 30
        canvas.box(x, y, 14, 14, colour)
        canvas.text(x + 22, y + 1, f"{name} {size / GIB:.2f} gib", _INK)
    return canvas.finish()
