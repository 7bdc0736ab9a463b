"""Sum up a trace by spans and buckets, as tables and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

Event = dict[str, Any]

# In the order in which a step goes through them.
_ORDER = ("plan", "prepare", "wait", "commit", "step", "forward", "sample", "copy")
_OURS = ("step", "device", "compile")


@dataclass(slots=True)
class SpanTime:
    """All spans of one name inside the same others: how many, and milliseconds in all and of the longest.

    `path` is the names of those around it, outermost first, then its own.
    """

    path: tuple[str, ...]
    category: str
    count: int = 0
    total_ms: float = 0.0
    longest_ms: float = 0.0

    def add(self, ms: float) -> None:
        self.count += 1
        self.total_ms += ms
        self.longest_ms = max(self.longest_ms, ms)


@dataclass(slots=True)
class BucketTime:
    """All forwards of one bucket, with real and padded tokens and context blocks."""

    phase: str
    bucket: str
    count: int = 0
    total_ms: float = 0.0
    tokens: int = 0
    padding_tokens: int = 0
    blocks: int = 0
    padding_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Summary:
    """`seconds` from the first span's begin to the last one's end. Spans in the order of a step."""

    seconds: float
    steps: int
    dropped_events: int
    spans: tuple[SpanTime, ...] = ()
    buckets: tuple[BucketTime, ...] = ()
    compiled_steps: tuple[int, ...] = ()
    device_events: int = 0

    @property
    def steps_per_second(self) -> float:
        return self.steps / self.seconds if self.seconds else 0.0

    def share(self, ms: float) -> float:
        """Return the share of the whole time."""
        return ms / 1000 / self.seconds if self.seconds else 0.0

    def padding(self, unit: str) -> float | None:
        """Return the share of padding in all `tokens` or `blocks` of the forwards; None if there are none."""
        return padding_share(self.buckets, unit)


def padding_share(buckets: Iterable[BucketTime], unit: str) -> float | None:
    """Return the share of padding in `tokens` or `blocks` of these buckets; None if they have none."""
    listed = list(buckets)
    padding = sum(int(getattr(bucket, f"padding_{unit}")) for bucket in listed)
    whole = padding + sum(int(getattr(bucket, unit)) for bucket in listed)
    return padding / whole if whole else None


def summarise(events: Sequence[Event], *, steps: int, dropped_events: int) -> Summary:
    """Read the events of an engine's trace; those of a device's own profiler are only counted."""
    ours = [event for event in events if event["ph"] == "X" and "step" in event.get("args", {})]
    spans: dict[tuple[str, ...], SpanTime] = {}
    buckets: dict[tuple[str, str], BucketTime] = {}
    compiled: set[int] = set()
    for path, event in _with_paths(ours):
        category, args, ms = event["cat"], event["args"], event["dur"] / 1000
        spans.setdefault(path, SpanTime(path, category)).add(ms)
        if args.get("compilations") or category == "compile":
            compiled.add(args["step"])
        if "tokens" in args:
            key = event["name"].partition(" ")[0], args["bucket"]
            _add(buckets.setdefault(key, BucketTime(*key)), args, ms)
    begin = min((event["ts"] for event in ours), default=0.0)
    end = max((event["ts"] + event["dur"] for event in ours), default=0.0)
    return Summary(
        seconds=(end - begin) / 1e6,
        steps=steps,
        dropped_events=dropped_events,
        spans=tuple(sorted(spans.values(), key=lambda span: _place(span, spans))),
        buckets=tuple(sorted(buckets.values(), key=lambda bucket: -bucket.total_ms)),
        compiled_steps=tuple(sorted(compiled)),
        device_events=sum(event["ph"] == "X" and event.get("cat") not in _OURS for event in events),
    )


def _add(bucket: BucketTime, args: dict[str, Any], ms: float) -> None:
    bucket.count += 1
    bucket.total_ms += ms
    for name in ("tokens", "padding_tokens", "blocks", "padding_blocks"):
        setattr(bucket, name, getattr(bucket, name) + args[name])


def _with_paths(events: Iterable[Event]) -> Iterator[tuple[tuple[str, ...], Event]]:
    """Yield each span with the names of the spans of its thread that enclose it, and its own."""
    open_spans: dict[tuple[int, int], list[Event]] = {}
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        around = open_spans.setdefault((event["pid"], event["tid"]), [])
        while around and around[-1]["ts"] + around[-1]["dur"] <= event["ts"]:
            around.pop()
        around.append(event)
        yield tuple(span["name"] for span in around), event


def _place(span: SpanTime, spans: Mapping[tuple[str, ...], SpanTime]) -> tuple[tuple[int, float, str], ...]:
    """Return a span's place in a table: after the one around it, in the order of a step, then by time."""
    outer = (spans[span.path[:depth]] for depth in range(1, len(span.path) + 1))
    return tuple(
        (_ORDER.index(one.path[-1]), 0.0, "") if one.path[-1] in _ORDER else (99, -one.total_ms, one.path[-1])
        for one in outer
    )


_SHOWN_BUCKETS = 10
_SHOWN_STEPS = 8


def as_json(summary: Summary, output: str) -> str:
    """Return one JSON object; shares of the whole time and of padding are 0..1."""
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
    """Return remarks that complete the tables, one line each."""
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
