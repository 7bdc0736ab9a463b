"""Plots of a benchmark as PNG files. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from catenary_apps.bench.target import Point, Sweep
from catenary_apps.cli.output import write_file
from catenary_apps.cli.pictures import png_of
from catenary_apps.load import LoadResult, percentile_name, shown, timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SIZE = (10.0, 7.0)
_BINS = 60
_LATENCIES = (
    ("ttft_ms", "time to first token"),
    ("tpot_ms", "time per output token"),
    ("itl_ms", "between chunks"),
    ("e2e_ms", "end to end"),
)


def draw(directory: Path, sweep: Sweep | None, points: Sequence[Point]) -> None:
    """Write the plots of all runs: latencies.png and throughput.png, of a sweep one of each for every value
    and sweep.png. Raises StartRefused if a file cannot be written."""
    for point in points:
        ending = "" if point.value is None else f"-{point.value:g}"
        _save(latencies(point.result), directory / f"latencies{ending}.png")
        _save(throughput(point.result), directory / f"throughput{ending}.png")
    if sweep is not None:
        _save(curves(sweep, points), directory / "sweep.png")


def latencies(result: LoadResult) -> Figure:
    """Draw four histograms of completed requests, with median and 99th percentile."""
    figure = _figure()
    ending = ", interrupted" if result.interrupted else ""
    counts = f"{result.completed} answered, {result.failed} failed{ending}"
    figure.suptitle(f"{shown(result.model)}: {counts}", parse_math=False)
    axes = figure.subplots(2, 2).flat
    for axis, (name, title) in zip(axes, _LATENCIES, strict=True):
        found = getattr(result, name)
        axis.set_title(title)
        axis.set_xlabel("milliseconds")
        axis.set_ylabel("chunks" if name == "itl_ms" else "requests")
        axis.hist(_samples(result, name), bins=_BINS, color="tab:blue", alpha=0.7)
        axis.locator_params(axis="y", integer=True)
        ranks = {
            "p50": found.median,
            **{percentile_name(one): value for one, value in found.percentiles.items()},
        }
        for style, label in (("-", "p50"), ("--", "p99")):
            if (value := ranks.get(label)) is not None:
                legend = f"{label} {value:,.{0 if value >= 100 else 2}f} ms"
                axis.axvline(value, color="tab:red", linestyle=style, label=legend)
        if axis.get_legend_handles_labels()[0]:
            axis.legend()
    return figure


def throughput(result: LoadResult) -> Figure:
    """Draw output tokens and completed requests a second over the time of the run."""
    line = timeline(result.records, result.duration_s)
    edges = [index * line.bin_s for index in range(len(line.completed_per_s) + 1)]
    figure = _figure()
    upper, lower = figure.subplots(2, 1, sharex=True)
    for axis, rates, label in (
        (upper, line.output_tokens_per_s, "output tokens/s"),
        (lower, line.completed_per_s, "completed requests/s"),
    ):
        axis.stairs(rates, edges, baseline=None)
        axis.set_ylabel(label)
        _from_zero(axis)
    upper.set_title(f"{shown(result.model)}: throughput in bins of {line.bin_s:.3g} s", parse_math=False)
    lower.set_xlabel("seconds")
    return figure


def curves(sweep: Sweep, points: Sequence[Point]) -> Figure:
    """Draw throughput and latencies over what was swept; a percentile among failures has no point."""
    figure = _figure()
    figure.suptitle(shown(points[0].result.model), parse_math=False)
    grid = figure.subplots(2, 2)
    values = [point.value or 0.0 for point in points]
    axis = grid[0, 0]
    axis.set_title("output tokens/s")
    axis.plot(values, [_shown(point.result.output_throughput) for point in points], "o-")
    for axis, (name, title) in zip(
        (grid[0, 1], grid[1, 0], grid[1, 1]), (_LATENCIES[0], _LATENCIES[1], _LATENCIES[3]), strict=True
    ):
        axis.set_title(f"{title}, ms")
        found = [getattr(point.result, name) for point in points]
        for percent in found[0].percentiles:
            ranks = [one.percentiles[percent] for one in found]
            axis.plot(values, [_shown(rank) for rank in ranks], "o-", label=percentile_name(percent))
        axis.legend()
    for axis in grid.flat:
        axis.set_xlabel("requests a second" if sweep.swept.value == "rate" else "concurrency")
        _from_zero(axis)
    return figure


def _figure() -> Figure:
    # An extra of its own, which a run without plots does not need.
    from matplotlib.figure import Figure

    return Figure(figsize=_SIZE, layout="constrained")


def _from_zero(axis: Axes) -> None:
    """Begin an axis at 0, with room above the highest point."""
    left, right = axis.get_xlim()
    axis.update_datalim([((left + right) / 2, 0)])
    axis.autoscale_view()
    axis.set_ylim(bottom=0)


def _samples(result: LoadResult, name: str) -> list[float]:
    if name == "itl_ms":
        return [gap for record in result.records for gap in record.gaps_ms]
    values = [getattr(record, name) for record in result.records if record.failure is None]
    return [value for value in values if value is not None]


def _shown(value: float | None) -> float:
    """Return a number for a plot: a gap where there is none."""
    return float("nan") if value is None else value


def _save(figure: Figure, file: Path) -> None:
    write_file(file, png_of(figure), "--plots")
