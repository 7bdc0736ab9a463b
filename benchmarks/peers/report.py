"""Medians, spreads and ratios of samples, as tables of Markdown and as a picture."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.peers.environments import PeerError
from benchmarks.peers.measuring import FIRST_TOKEN, Sample
from catenary.runtime import StartRefused
from catenary_apps.cli.output import write_file
from catenary_apps.cli.pictures import check_picture, png_of


@dataclass(frozen=True, slots=True)
class Cell:
    """Several values of one thing."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Cell:
        """Raise ValueError without values."""
        return cls(statistics.median(values), min(values), max(values))

    def text(self, digits: int) -> str:
        """Median, and least to most in brackets."""
        return f"{self.median:.{digits}f} ({self.least:.{digits}f}-{self.most:.{digits}f})"


def cell(samples: Sequence[Sample], subject: str, streams: int) -> Cell | None:
    """Return a subject's result at so many streams."""
    values = [one.value for one in samples if one.subject == subject and one.streams == streams]
    return Cell.of(values) if values else None


def ratio(samples: Sequence[Sample], own: str, peer: str, streams: int) -> Cell | None:
    """Own over peer, repeat by repeat: what struck a whole repeat strikes both."""
    pairs = {
        (one.subject, one.repeat): one.value
        for one in samples
        if one.streams == streams and one.subject in (own, peer)
    }
    repeats = sorted({repeat for _, repeat in pairs})
    values = [
        pairs[own, repeat] / pairs[peer, repeat]
        for repeat in repeats
        if (own, repeat) in pairs and pairs.get((peer, repeat))
    ]
    return Cell.of(values) if values else None


def best(samples: Sequence[Sample], peers: Sequence[str], streams: int) -> str | None:
    """Return the peer with the highest throughput, or with FIRST_TOKEN the shortest time."""
    found = {peer: value.median for peer in peers if (value := cell(samples, peer, streams)) is not None}
    if not found:
        return None
    return (min if streams == FIRST_TOKEN else max)(found, key=found.__getitem__)


def figures(
    samples: Sequence[Sample], names: Sequence[str], streams: Sequence[int], starts: Mapping[str, float]
) -> list[str]:
    """Return a row for each subject: tokens per second, first token, start."""
    head = [f"{count} stream{'s' if count > 1 else ''}, tokens/s" for count in streams]
    rows = [["server", *head, "first token, ms", "start, s"]]
    for name in names:
        cells = [_text(cell(samples, name, count), 1) for count in streams]
        start = f"{starts[name]:.1f}" if name in starts else "-"
        rows.append([name, *cells, _text(cell(samples, name, FIRST_TOKEN), 0), start])
    return table(rows)


def ratios(
    samples: Sequence[Sample],
    own: Sequence[str],
    peers: Mapping[str, str],
    precisions: Mapping[str, str],
    streams: Sequence[int],
) -> list[str]:
    """Return rows of each own subject over each peer, over the best of its precision and over the best of
    all.

    `peers`: precision by name; `precisions`: that of own subjects. Below 1 is better for the first token.
    """
    rows = [["over", *(f"{count}" for count in streams), "first token"]]
    for name in own:
        alike = [peer for peer, precision in peers.items() if precision == precisions[name]]
        groups: list[tuple[str, Sequence[str]]] = [(peer, (peer,)) for peer in peers]
        if len(alike) > 1:
            groups.append((f"the best {precisions[name]} peer", alike))
        if len(peers) > 1:
            groups.append(("the best peer", list(peers)))
        for label, group in groups:
            row = [f"{name} / {label}"]
            for count in (*streams, FIRST_TOKEN):
                peer = best(samples, group, count)
                row.append(_text(ratio(samples, name, peer, count) if peer is not None else None, 2))
            rows.append(row)
    return table(rows)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines of a table; the first row is its head."""
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return [f"| {' | '.join(row)} |" for row in lines]


def _text(value: Cell | None, digits: int) -> str:
    return "-" if value is None else value.text(digits)


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SIZE = (11.0, 4.2)
_DPI = 100
# The bars of one group take so much of its room.
_GROUP = 0.85


def check_plot(file: Path) -> None:
    """Check that the plot can be drawn, before hours are measured. Raises PeerError."""
    try:
        check_picture(file, "--plot")
    except StartRefused as error:
        raise PeerError(str(error)) from None


def save_plot(file: Path, samples: Sequence[Sample], names: Sequence[str], streams: Sequence[int]) -> None:
    """Write the picture, whatever the file is called, as PNG. Raises PeerError if that is not possible."""
    try:
        write_file(file, png_of(bars(samples, names, streams), dpi=_DPI), "--plot")
    except StartRefused as error:
        raise PeerError(str(error)) from None


def bars(samples: Sequence[Sample], names: Sequence[str], streams: Sequence[int]) -> Figure:
    """Return medians of tokens a second by streams, and of the time to the first token; lines are least to
    most."""
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
