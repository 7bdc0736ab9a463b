"""The result of `catenary bench serve` for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from catenary_apps.bench.target import Sweep
from catenary_apps.load import Distribution, LoadPlan, LoadResult, percentile_name, shown

_NAMES = (
    ("ttft_ms", "time to first token"),
    ("tpot_ms", "time per output token"),
    ("itl_ms", "between chunks (ITL)"),
    ("e2e_ms", "end to end"),
    ("late_ms", "started late by"),
)
# Above this share of a core, the client's own work shows in what it measures.
_BUSY = 0.8


def show(plan: LoadPlan, result: LoadResult, console: Console) -> None:
    console.print(_counts(plan, result))
    console.print(_latencies(plan, result))
    for line in remarks(plan, result):
        # What a server said is no markup.
        console.print(line, highlight=False, markup=False)


def show_sweep(sweep: Sweep, runs: Sequence[tuple[float, LoadResult]], console: Console) -> None:
    """Print one line for each run."""
    table = Table(box=box.SIMPLE_HEAD)
    top = max((percent for _, result in runs for percent in result.ttft_ms.percentiles), default=50.0)
    heads = [head for name in ("TTFT", "TPOT", "E2E") for head in (f"{name} p50", percentile_name(top))]
    for head in (sweep.swept.value, "requests/s", "tokens/s", "good/s", "failed", *heads):
        table.add_column(head, justify="right")
    for value, result in runs:
        found = (result.ttft_ms, result.tpot_ms, result.e2e_ms)
        ranks = [rank for one in found for rank in (one.median, one.percentiles.get(top, one.median))]
        table.add_row(
            f"{value:g}, interrupted" if result.interrupted else f"{value:g}",
            number(result.request_throughput),
            number(result.output_throughput),
            number(result.goodput),
            str(result.failed),
            *(number(rank) for rank in ranks),
        )
    console.print(table)
    for value, result in runs:
        if result.failures:
            line = f"{sweep.swept.value} {value:g}: {_failures(result)}"
            console.print(line, highlight=False, markup=False)
    if any(result.client_cpu > _BUSY for _, result in runs):
        console.print("the client was busy: its own time is in the numbers")


def remarks(plan: LoadPlan, result: LoadResult) -> list[str]:
    """Return remarks that the numbers need, one line each."""
    lines = []
    if result.interrupted:
        running = f"{result.unfinished} requests that were running are in no number"
        lines.append(f"ended by Ctrl-C after {result.duration_s:.1f} s: {running}")
    if plan.arrivals.scheduled:
        lines.append("latencies count from when a request was due")
    if result.failures:
        lines.append(_failures(result))
        lines.append("a failed request is slower than every answer: - where a percentile is among them")
        lines.append("mean and std are of the answered requests alone")
    if result.skipped:
        lines.append(f"{result.skipped} turns were not asked, since one before them failed")
    if result.used_up:
        lines.append("the prompts were used up before --duration-s was over: --num-prompts makes more")
    if result.resent:
        lines.append(f"{result.resent} requests were sent again: the server had closed their connection")
    if result.wrong_lengths:
        lines.append(f"{result.wrong_lengths} answers have another number of tokens than was asked for")
    if result.output_tokens is None:
        lines.append("the server sends no usage: tokens are not known (--tokenizer would count them)")
    if result.client_cpu > _BUSY:
        lines.append(f"the client kept {result.client_cpu:.1f} cores busy: its own time is in the numbers")
    return lines


def _failures(result: LoadResult) -> str:
    kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(result.failures.items()))
    first = next(record for record in result.records if record.failure is not None)
    return f"failed: {kinds}; the first: {first.failure}: {first.detail}"


def number(value: float | None) -> str:
    """Return a rate or a time, with as many digits as say something."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:,.2f}"


def _counts(plan: LoadPlan, result: LoadResult) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    rows = [
        ("model", shown(result.model)),
        ("requests", f"{result.completed} answered, {result.failed} failed"),
        ("duration", f"{result.duration_s:.2f} s"),
        ("most at one moment", str(result.peak_concurrency)),
        ("input tokens", _whole(result.input_tokens)),
        ("of these cached", _whole(result.cached_tokens)),
        ("output tokens", _whole(result.output_tokens)),
        ("requests/s", number(result.request_throughput)),
        ("output tokens/s", number(result.output_throughput)),
        ("all tokens/s", number(result.total_throughput)),
    ]
    if result.output_tokens is not None and result.chunks:
        rows.append(("tokens a chunk", f"{result.output_tokens / result.chunks:.2f}"))
    if result.goodput is not None:
        limits = ", ".join(f"{name} {limit:g} ms" for name, limit in plan.objectives.items())
        rows.append((f"goodput/s ({limits})", f"{number(result.goodput)} ({result.good} requests)"))
    for name, value in rows:
        table.add_row(name, escape(value))
    return table


def _latencies(plan: LoadPlan, result: LoadResult) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("milliseconds")
    for head in ("mean", "std", *(percentile_name(percent) for percent in plan.percentiles)):
        table.add_column(head, justify="right")
    for name, words in _NAMES:
        found: Distribution | None = getattr(result, name)
        if found is not None:
            ranks = (number(value) for value in found.percentiles.values())
            cells = (number(found.mean), number(found.std), *ranks)
            table.add_row(words, *cells)
    return table


def _whole(count: int | None) -> str:
    return "-" if count is None else f"{count:,}"
