"""The result of a run: latencies, throughput and goodput, also as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from catenary_apps.load.plan import LoadPlan, is_good
from catenary_apps.load.statistics import (
    Distribution,
    Record,
    describe,
    peak_overlap,
    percentile_name,
    timeline,
)


@dataclass(frozen=True, slots=True)
class Course:
    """Facts of a run that no record holds.

    Attributes:
        seconds: from the start to the end of the last request.
        cpu_s: CPU seconds of this process meanwhile.
        skipped: turns that were never asked.
        resent: requests that were sent again on another connection.
        used_up: whether all conversations had begun before the duration of the plan was over.
        interrupted: whether the run was ended early, `unfinished` requests being on their way.
    """

    seconds: float
    cpu_s: float
    skipped: int = 0
    resent: int = 0
    used_up: bool = False
    interrupted: bool = False
    unfinished: int = 0


@dataclass(frozen=True, slots=True)
class LoadResult:
    """A run in numbers; rates are per second of `duration_s`.

    Attributes:
        model: its name at the server.
        duration_s: from the start to the end of the last request.
        completed: requests that were answered as asked.
        failures: how many were not, by kind.
        skipped: turns that were never asked, since one before them failed.
        resent: requests that were sent again, since the server closed a kept connection without a word.
        used_up: whether all conversations had begun before the plan's duration was over.
        interrupted: whether Ctrl-C ended the run.
        unfinished: requests that were on their way then. They are in no other number.
        wrong_lengths: completed requests whose answer has another number of tokens than was asked for.
        input_tokens, output_tokens, cached_tokens: of completed requests; None if one of them has no count.
        chunks: that brought something, of completed requests. They are no tokens.
        request_throughput, output_throughput, total_throughput: completed requests, their generated tokens,
            all their tokens.
        goodput: completed requests a second that keep all objectives; None without objectives.
        good: how many.
        ttft_ms, tpot_ms, e2e_ms: a failed request is slower than every other.
        itl_ms: gaps between chunks of all requests, failed ones included.
        late_ms: how much later than due requests were sent; None in a closed loop.
        peak_concurrency: most requests at one moment.
        client_cpu: cores that this process kept busy on average; near 1 the client limits what it measures.
        records: of all requests, in the order of their ends.
    """

    model: str
    duration_s: float
    completed: int
    failures: dict[str, int]
    skipped: int
    resent: int
    used_up: bool
    interrupted: bool
    unfinished: int
    wrong_lengths: int
    input_tokens: int | None
    output_tokens: int | None
    cached_tokens: int | None
    chunks: int
    request_throughput: float
    output_throughput: float | None
    total_throughput: float | None
    goodput: float | None
    good: int
    ttft_ms: Distribution
    tpot_ms: Distribution
    itl_ms: Distribution
    e2e_ms: Distribution
    late_ms: Distribution | None
    peak_concurrency: int
    client_cpu: float
    records: list[Record]

    @property
    def failed(self) -> int:
        """Requests that were not answered as asked."""
        return sum(self.failures.values())


def evaluate(plan: LoadPlan, model: str, records: Sequence[Record], course: Course) -> LoadResult:
    """Sum up the records of a run. An answer without usage, where others have it, was cut."""
    records = _all_with_usage(records)
    completed = [record for record in records if record.failure is None]
    failed, seconds = len(records) - len(completed), max(course.seconds, 1e-9)
    inputs = _total([record.prompt_tokens for record in completed])
    outputs = _total([record.output_tokens for record in completed])
    good = sum(is_good(_measured(record), plan.objectives) for record in completed)
    ranks = plan.percentiles

    def per_request(values: Sequence[float | None]) -> Distribution:
        return describe([value for value in values if value is not None], ranks, failed=failed)

    return LoadResult(
        model=model,
        duration_s=course.seconds,
        completed=len(completed),
        failures=dict(Counter(record.failure for record in records if record.failure is not None)),
        skipped=course.skipped,
        resent=course.resent,
        used_up=course.used_up,
        interrupted=course.interrupted,
        unfinished=course.unfinished,
        wrong_lengths=sum(_differs(record) for record in completed),
        input_tokens=inputs,
        output_tokens=outputs,
        cached_tokens=_total([record.cached_tokens for record in completed]),
        chunks=sum(len(record.moments) for record in completed),
        request_throughput=len(completed) / seconds,
        output_throughput=None if outputs is None else outputs / seconds,
        total_throughput=None if outputs is None or inputs is None else (inputs + outputs) / seconds,
        goodput=good / seconds if plan.objectives else None,
        good=good,
        ttft_ms=per_request([record.ttft_ms for record in completed]),
        tpot_ms=per_request([record.tpot_ms for record in completed]),
        e2e_ms=per_request([record.e2e_ms for record in completed]),
        itl_ms=describe([gap for record in records for gap in record.gaps_ms], ranks),
        late_ms=describe([one.late_ms for one in records], ranks) if plan.arrivals.scheduled else None,
        peak_concurrency=peak_overlap([(record.sent_s, record.ended_s) for record in records]),
        client_cpu=course.cpu_s / seconds,
        records=list(records),
    )


def _all_with_usage(records: Sequence[Record]) -> Sequence[Record]:
    if all(record.output_tokens is None for record in records):
        return records
    detail = "the answer has no usage, which others have"
    return [
        replace(one, failure="cut", detail=detail)
        if one.failure is None and one.output_tokens is None
        else one
        for one in records
    ]


def _total(counts: Sequence[int | None]) -> int | None:
    """Return the sum, None if one of them is not known."""
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _differs(record: Record) -> bool:
    known = record.output_tokens is not None and record.asked_tokens is not None
    return known and record.output_tokens != record.asked_tokens


def _measured(record: Record) -> dict[str, float | None]:
    return {"ttft": record.ttft_ms, "tpot": record.tpot_ms, "e2e": record.e2e_ms}


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
    """Return the numbers of a run; `with_records` also those of each request."""
    document: dict[str, Any] = {name: getattr(result, name) for name in _PLAIN}
    for name in _DISTRIBUTIONS:
        found: Distribution | None = getattr(result, name)
        document[name] = None if found is None else distribution_json(found)
    document["timeline"] = asdict(timeline(result.records, result.duration_s))
    if with_records:
        document["requests"] = [_record_json(record) for record in result.records]
    return document


def distribution_json(found: Distribution) -> dict[str, Any]:
    """Return one distribution; percentiles are named p50, p99.9."""
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
