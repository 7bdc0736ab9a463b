"""A comparison as a picture: bars with their spread. Needs matplotlib, like the plots of `catenary bench`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.peers.environments import PeerError
from benchmarks.peers.measuring import FIRST_TOKEN, Sample
from benchmarks.peers.report import Cell, cell
from catenary.runtime import StartRefused
from catenary_apps.cli.output import write_file
from catenary_apps.cli.pictures import check_picture, png_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SIZE = (11.0, 4.2)
_DPI = 100
# The bars of one group take so much of its room.
_GROUP = 0.85


def check_plot(file: Path) -> None:
    """What could not be drawn is to be known before hours are measured. Raises PeerError."""
    try:
        check_picture(file, "--plot")
    except StartRefused as error:
        raise PeerError(str(error)) from None


def save_plot(file: Path, samples: Sequence[Sample], names: Sequence[str], streams: Sequence[int]) -> None:
    """Writes the picture, whatever the file is called, as PNG. Raises PeerError if that is not possible."""
    try:
        write_file(file, png_of(bars(samples, names, streams), dpi=_DPI), "--plot")
    except StartRefused as error:
        raise PeerError(str(error)) from None


def bars(samples: Sequence[Sample], names: Sequence[str], streams: Sequence[int]) -> Figure:
    """Medians of tokens a second by streams, and of the time to the first token; lines are least to most."""
    # An extra of its own, which a comparison without a picture does not need.
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=_SIZE, layout="constrained")
    timed = any(sample.streams == FIRST_TOKEN for sample in samples)
    widths = (max(1, len(streams)), 1)
    rates, *others = figure.subplots(1, 1 + timed, squeeze=False, width_ratios=widths[: 1 + timed])[0]
    _group(rates, samples, names, streams)
    rates.set_title("output tokens/s, more is better")
    rates.set_xticks(range(len(streams)), [f"{count} stream{'s' if count > 1 else ''}" for count in streams])
    for axis in others:
        _group(axis, samples, names, (FIRST_TOKEN,))
        axis.set_title("first token, ms, less is better")
        axis.set_xticks([])
    rates.legend(loc="upper left")
    return figure


def _group(axis: Axes, samples: Sequence[Sample], names: Sequence[str], streams: Sequence[int]) -> None:
    """For each number of streams a bar of each server that was measured with it."""
    width = _GROUP / max(1, len(names))
    for number, name in enumerate(names):
        left = (number - (len(names) - 1) / 2) * width
        found = [(place + left, cell(samples, name, count)) for place, count in enumerate(streams)]
        _bars(axis, name, width, [(place, value) for place, value in found if value is not None])
    axis.margins(y=0.15)


def _bars(axis: Axes, name: str, width: float, found: Sequence[tuple[float, Cell]]) -> None:
    values = [value for _, value in found]
    spread = [
        [value.median - value.least for value in values],
        [value.most - value.median for value in values],
    ]
    drawn = axis.bar(
        [place for place, _ in found],
        [value.median for value in values],
        width,
        yerr=spread,
        capsize=3,
        label=name,
    )
    axis.bar_label(drawn, fmt="%.0f", fontsize=7, padding=1)
