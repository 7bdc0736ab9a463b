"""A summary as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from catenary_apps.profile.summary import BucketTime, Summary, padding_share

_SHOWN_BUCKETS = 10
_SHOWN_STEPS = 8


def as_json(summary: Summary, output: str) -> str:
    """One JSON object; shares of the whole time and of padding are 0..1."""
    document = {
        "output": output,
        "steps": summary.steps,
        "seconds": summary.seconds,
        "steps_per_second": summary.steps_per_second,
        "token_padding": summary.padding("tokens"),
        "block_padding": summary.padding("blocks"),
        "compiled_steps": list(summary.compiled_steps),
        "dropped_events": summary.dropped_events,
        "device_events": summary.device_events,
        "spans": [
            {**asdict(span), "path": "/".join(span.path), "share": summary.share(span.total_ms)}
            for span in summary.spans
        ],
        "buckets": [asdict(bucket) for bucket in summary.buckets],
    }
    return json.dumps(document, indent=2)


def show(summary: Summary, console: Console) -> None:
    """Print tables for people."""
    if summary.spans:
        console.print(_span_table(summary))
    if summary.buckets:
        console.print(_bucket_table(summary))
    for line in lines(summary):
        console.print(line, highlight=False, soft_wrap=True)


def lines(summary: Summary) -> Iterator[str]:
    """What the tables do not say."""
    yield (
        f"{summary.steps} steps in {summary.seconds:.2f} s: {summary.steps_per_second:.1f} steps per second"
    )
    if summary.buckets:
        yield (
            f"padding: {_percent(summary.padding('tokens'))} of the tokens, "
            f"{_percent(summary.padding('blocks'))} of the context blocks"
        )
    compiled = summary.compiled_steps
    if compiled:
        named = ", ".join(map(str, compiled[:_SHOWN_STEPS]))
        more = f" and {len(compiled) - _SHOWN_STEPS} more" if len(compiled) > _SHOWN_STEPS else ""
        yield f"steps with compilations: {len(compiled)} ({named}{more})"
    else:
        yield "steps with compilations: none"
    if summary.dropped_events:
        yield (
            f"{summary.dropped_events} events had no room: take fewer steps, or raise the engine's "
            "--profile-max-events"
        )


def _span_table(summary: Summary) -> Table:
    table = _table("span", "count", "total ms", "mean ms", "longest ms", "share")
    for span in summary.spans:
        table.add_row(
            "  " * (len(span.path) - 1) + span.path[-1],
            str(span.count),
            f"{span.total_ms:.1f}",
            f"{span.total_ms / span.count:.3f}",
            f"{span.longest_ms:.3f}",
            _percent(summary.share(span.total_ms)),
            style="bold red" if span.category == "compile" else None,
        )
    return table


def _bucket_table(summary: Summary) -> Table:
    table = _table("bucket", "count", "mean ms", "share", "token padding", "block padding")
    for bucket in summary.buckets[:_SHOWN_BUCKETS]:
        table.add_row(*_bucket_row(summary, bucket))
    hidden = len(summary.buckets) - _SHOWN_BUCKETS
    if hidden > 0:
        table.caption = f"and {hidden} more with less time"
    return table


def _bucket_row(summary: Summary, bucket: BucketTime) -> tuple[str, ...]:
    return (
        f"{bucket.phase}: {bucket.bucket}",
        str(bucket.count),
        f"{bucket.total_ms / bucket.count:.3f}",
        _percent(summary.share(bucket.total_ms)),
        _percent(padding_share([bucket], "tokens")),
        _percent(padding_share([bucket], "blocks")),
    )


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right")
    return table


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
