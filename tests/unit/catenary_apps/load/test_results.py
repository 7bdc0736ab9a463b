from __future__ import annotations

import json
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catenary_apps.load import Arrivals, Conversation, LoadPlan, Target, Turn, as_json, timeline
from catenary_apps.load.results import Course, LoadResult, evaluate
from catenary_apps.load.statistics import Record


def _record(*moments: float, **fields: Any) -> Record:
    """Sent at second 1, due at 1, three tokens a chunk but for the first."""
    defaults = {
        "conversation": 0,
        "turn": 0,
        "due_s": 1.0,
        "sent_s": 1.0,
        "ended_s": moments[-1] if moments else 2.0,
        "prompt_tokens": 10,
        "cached_tokens": None,
        "output_tokens": 3 * len(moments) - 2 if moments else None,
        "asked_tokens": None,
        "failure": None,
        "detail": "",
    }
    return Record(moments=array("d", moments), **{**defaults, **fields})


def _evaluate(*records: Record, seconds: float = 10.0, **fields: Any) -> LoadResult:
    plan = LoadPlan(target=Target(), conversations=[Conversation((Turn("a", 1),))] * 2, **fields)
    return evaluate(plan, "m", records, Course(seconds, 1.0))


def test_latencies_count_from_when_a_request_was_due() -> None:
    record = _record(3.0, 4.0, 5.0, due_s=0.5)
    assert record.ttft_ms == 2500
    assert record.e2e_ms == 4500
    assert record.tpot_ms == pytest.approx(2000 / 6), "seven tokens: six after the first"
    assert record.gaps_ms == [1000, 1000]
    assert record.late_ms == 500


def test_rates_are_of_what_was_answered() -> None:
    result = _evaluate(_record(2.0, 3.0), _record(2.0, 4.0), _record(2.0, failure="cut", output_tokens=None))
    assert (result.completed, result.failed, result.failures) == (2, 1, {"cut": 1})
    assert (result.input_tokens, result.output_tokens, result.chunks) == (20, 8, 4)
    assert (result.request_throughput, result.output_throughput, result.total_throughput) == (0.2, 0.8, 2.8)
    assert result.client_cpu == 0.1
    assert result.goodput is None
    assert result.late_ms is None


def test_failures_make_nothing_look_better() -> None:
    slow, fast = [_record(1.0 + second) for second in (9.0, 8.0)], [_record(1.1)] * 98
    whole = _evaluate(*fast, *slow)
    refused = _evaluate(*fast, *[_record(failure="http_429", ended_s=1.001)] * 2)
    assert whole.ttft_ms.percentiles[99.0] == pytest.approx(8010)
    assert refused.ttft_ms.percentiles[99.0] is None
    assert refused.e2e_ms.percentiles[99.0] is None
    assert refused.ttft_ms.median == whole.ttft_ms.median
    nothing = _evaluate(_record(failure="connect"))
    assert (nothing.ttft_ms.median, nothing.output_throughput, nothing.completed) == (None, 0, 0)


def test_the_gaps_of_a_stream_that_was_cut_count() -> None:
    result = _evaluate(_record(2.0, 2.5, failure="timeout", ended_s=62.5))
    assert result.itl_ms.maximum == 60_000
    assert result.itl_ms.count == 2


def test_tokens_are_not_known_without_usage() -> None:
    result = _evaluate(_record(2.0, output_tokens=None), _record(failure="connect"))
    assert (result.output_tokens, result.output_throughput, result.total_throughput) == (None, None, None)
    assert (result.completed, result.failed) == (1, 1)


def test_an_answer_without_the_usage_that_others_have_was_cut() -> None:
    result = _evaluate(_record(2.0), _record(2.0, output_tokens=None))
    assert (result.completed, result.output_tokens, result.failures) == (1, 1, {"cut": 1})
    assert "usage" in result.records[1].detail


def test_goodput_is_what_keeps_the_limits() -> None:
    result = _evaluate(
        *(_record(1.1), _record(1.3), _record(failure="cut")), objectives={"ttft": 200.0, "tpot": 1.0}
    )
    assert (result.good, result.goodput) == (1, 0.1)


def test_other_lengths_are_counted_and_late_starts_too() -> None:
    result = _evaluate(
        _record(2.0, asked_tokens=2), _record(2.0, asked_tokens=1, sent_s=1.5), arrivals=Arrivals(5.0)
    )
    assert result.wrong_lengths == 1
    assert result.late_ms is not None
    assert result.late_ms.maximum == 500


@given(st.lists(st.lists(st.floats(1, 99), min_size=1, max_size=5), max_size=5), st.floats(99, 5000))
def test_the_timeline_has_all_tokens_and_all_requests(starts: list[list[float]], duration_s: float) -> None:
    records = [_record(*sorted(moments)) for moments in starts]
    line = timeline(records, duration_s)
    assert len(line.output_tokens_per_s) == len(line.completed_per_s) <= 600
    tokens = sum(record.output_tokens or 0 for record in records)
    assert sum(line.output_tokens_per_s) * line.bin_s == pytest.approx(tokens)
    assert sum(line.completed_per_s) * line.bin_s == pytest.approx(len(records))


def test_the_json_has_everything() -> None:
    result = _evaluate(_record(2.0, 3.0), _record(failure="cut"), percentiles=(50, 99.9))
    document = json.loads(json.dumps(as_json(result, with_records=True)))
    assert document["failures"] == {"cut": 1}
    assert document["ttft_ms"]["percentiles"] == {"p50": None, "p99.9": None}
    assert document["ttft_ms"]["mean"] == 1000
    assert document["late_ms"] is None
    assert document["timeline"]["bin_s"] == 1.0
    assert [request["failure"] for request in document["requests"]] == [None, "cut"]
    assert "requests" not in as_json(result)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_concurrency": 0},
        {"duration_s": 0},
        {"warmup": 2},
        {"warmup": -1},
        {"think_time_s": -1},
        {"objectives": {"itl": 1}},
        {"percentiles": (101,)},
        {"conversations": [Conversation(())]},
        {"conversations": [Conversation((Turn((1,), 1), Turn((2,), 1)))]},
    ],
)
def test_a_plan_that_cannot_be_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        LoadPlan(**{"target": Target(), "conversations": [Conversation((Turn("a", 1),))] * 2, **fields})
