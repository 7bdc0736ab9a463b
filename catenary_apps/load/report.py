"""A result as the JSON that docs/benchmarking.md describes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from catenary_apps.load.records import Record
from catenary_apps.load.results import LoadResult
from catenary_apps.load.statistics import Distribution, percentile_name
from catenary_apps.load.timeline import timeline

_PLAIN = (
    "model",
    "duration_s",
    "completed",
    "failed",
    "failures",
    "skipped",
    "resent",
    "used_up",
    "interrupted",
    "unfinished",
    "wrong_lengths",
    "input_tokens",
    "output_tokens",
    "cached_tokens",
    "chunks",
    "request_throughput",
    "output_throughput",
    "total_throughput",
    "goodput",
    "peak_concurrency",
    "client_cpu",
)
_DISTRIBUTIONS = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms", "late_ms")


def as_json(result: LoadResult, *, with_records: bool = False) -> dict[str, Any]:
    """The numbers of a run; `with_records` also those of each request."""
    document: dict[str, Any] = {name: getattr(result, name) for name in _PLAIN}
    for name in _DISTRIBUTIONS:
        found: Distribution | None = getattr(result, name)
        document[name] = None if found is None else distribution_json(found)
    document["timeline"] = asdict(timeline(result.records, result.duration_s))
    if with_records:
        document["requests"] = [_record_json(record) for record in result.records]
    return document


def distribution_json(found: Distribution) -> dict[str, Any]:
    """One distribution; percentiles are named p50, p99.9."""
    fields = asdict(found)
    fields["percentiles"] = {percentile_name(percent): value for percent, value in found.percentiles.items()}
    return fields


def _record_json(record: Record) -> dict[str, Any]:
    return {
        "conversation": record.conversation,
        "turn": record.turn,
        "due_s": record.due_s,
        "sent_s": record.sent_s,
        "ended_s": record.ended_s,
        "ttft_ms": record.ttft_ms,
        "tpot_ms": record.tpot_ms,
        "e2e_ms": record.e2e_ms,
        "gaps_ms": record.gaps_ms,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "output_tokens": record.output_tokens,
        "asked_tokens": record.asked_tokens,
        "failure": record.failure,
        "detail": record.detail,
        "request_id": record.request_id,
    }
