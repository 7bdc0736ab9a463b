"""Print a comparison of bucket strategies as a table and as JSON, and draw it."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from catenary_apps.buckets.compare import Comparison, Verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_GIB = 2**30
_SHOWN_OMITTED = 5


def as_json(comparison: Comparison) -> str:
    """Return one JSON object; times in seconds, padding as shares, memory in bytes."""
    limits = comparison.limits
    document: dict[str, Any] = {
        "model": comparison.sizes.name,
        "limits": asdict(limits),
        "kv_bytes": limits.num_blocks * limits.block_size * comparison.sizes.kv_bytes_per_token,
        "workload": comparison.source,
        "sequences": comparison.sequences,
        "step_times": comparison.step_times,
        "strategies": {name: _entry(verdict) for name, verdict in comparison.verdicts.items()},
    }
    return json.dumps(document, indent=2)


def _entry(verdict: Verdict) -> dict[str, Any]:
    found = verdict.assessment
    return {
        "graphs": found.graphs,
        "decode_padding": found.decode_padding,
        "query_padding": found.query_padding,
        "step_time": found.step_time,
        "prefill_graphs": found.prefill_graphs,
        "decode_graphs": found.decode_graphs,
        "decode_row_padding": found.decode_row_padding,
        "decode_block_padding": found.decode_block_padding,
        "graph_bytes": verdict.graph_bytes,
        "covered": verdict.covered,
        "notes": list(verdict.plan.notes),
        "omitted": [[b.batch, b.query, b.context_blocks] for b in verdict.plan.omitted],
    }


def as_table(comparison: Comparison) -> str:
    """Return lines for people."""
    limits = comparison.limits
    lines = [
        f"{comparison.sizes.name}: up to {limits.max_model_len} tokens, {limits.max_num_seqs} sequences, "
        f"{limits.max_num_batched_tokens} tokens a step, {limits.max_prefill_seqs} prompts together",
        f"KV: {limits.num_blocks} blocks of {limits.block_size} tokens"
        + (", fetched contiguously" if limits.contiguous else ""),
        f"workload: {comparison.sequences} sequences, {comparison.source}",
        f"step times: {comparison.step_times}",
        "",
        f"{'strategy':<12}{'prefill':>8}{'decode':>8}{'graphs':>8}{'memory':>11}  {'covered':<9}"
        f"{'rows':>8}{'blocks':>8}{'query':>8}{'step':>11}",
    ]
    for name, verdict in comparison.verdicts.items():
        found = verdict.assessment
        lines.append(
            f"{name:<12}{found.prefill_graphs:>8}{found.decode_graphs:>8}{found.graphs:>8}"
            f"{verdict.graph_bytes / _GIB:>7.2f} GiB  {'all' if verdict.covered else 'not all':<9}"
            f"{found.decode_row_padding:>8.1%}{found.decode_block_padding:>8.1%}{found.query_padding:>8.1%}"
            f"{found.step_time * 1e3:>8.3f} ms"
        )
    lines += ["", "rows, blocks: padding of decode; query: padding of prefill tokens, empty rows included"]
    for name, verdict in comparison.verdicts.items():
        omitted = verdict.plan.omitted
        if omitted:
            shown = ", ".join(str((b.batch, b.query, b.context_blocks)) for b in omitted[:_SHOWN_OMITTED])
            more = f" and {len(omitted) - _SHOWN_OMITTED} more" if len(omitted) > _SHOWN_OMITTED else ""
            lines.append(f"{name}: beyond the limits and left out: {shown}{more}")
        lines += [f"{name}: {note}" for note in verdict.plan.notes]
    return "\n".join(lines)


# Cells of a plot across and up, at most, and its size in inches.
_CELLS = 64, 40
_PANEL = (5.2, 3.6)


def draw(comparison: Comparison) -> Figure:
    """Return a heat map for each strategy: the sizes of decode steps, and the buckets that hold them.

    Cells are the real sizes of decode steps, redder where steps are more frequent (on a logarithmic scale);
    marks are the buckets. All plots of a comparison have the same axes, which end where the steps do.
    """
    from matplotlib.figure import Figure

    columns = min(2, len(comparison.verdicts))
    rows = -(-len(comparison.verdicts) // columns)
    figure = Figure(figsize=(columns * _PANEL[0], rows * _PANEL[1]), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    shapes = [shape for v in comparison.verdicts.values() for shape, _ in v.assessment.trace.decode]
    most_blocks = max((shape.context_blocks for shape in shapes), default=1)
    most_rows = max((shape.batch for shape in shapes), default=1)
    for axis in grid.flat[len(comparison.verdicts) :]:
        axis.remove()
    for axis, (name, verdict) in zip(grid.flat, comparison.verdicts.items(), strict=False):
        _draw_panel(axis, name, verdict, most_blocks=most_blocks, most_rows=most_rows)
    return figure


def _draw_panel(axis: Axes, name: str, verdict: Verdict, *, most_blocks: int, most_rows: int) -> None:
    found = verdict.assessment
    axis.set_title(
        f"{name}: {found.graphs} graphs, padding rows {found.decode_row_padding:.1%}, "
        f"blocks {found.decode_block_padding:.1%}",
        fontsize="small",
    )
    axis.set_xlabel("KV blocks of a decode step")
    axis.set_ylabel("rows")
    steps = found.trace.decode.items()
    if steps:
        axis.hist2d(
            [shape.context_blocks for (shape, _), _ in steps],
            [shape.batch for (shape, _), _ in steps],
            bins=(min(_CELLS[0], most_blocks + 1), min(_CELLS[1], most_rows + 1)),
            range=((-0.5, most_blocks + 0.5), (-0.5, most_rows + 0.5)),
            weights=[count for _, count in steps],
            norm="symlog",
            cmap="OrRd",
        )
    there = [b for b in verdict.plan.decode if b.context_blocks <= most_blocks and b.batch <= most_rows]
    axis.set_xlim(-0.5, most_blocks + 0.5)
    axis.set_ylim(-0.5, most_rows + 0.5)
    axis.plot(
        [b.context_blocks for b in there], [b.batch for b in there], "s", color="tab:blue", markersize=3
    )
