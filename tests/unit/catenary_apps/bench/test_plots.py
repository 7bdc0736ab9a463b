from __future__ import annotations

import math
import random
from array import array
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from catenary.runtime import StartRefused
from catenary_apps.bench.plots import curves, draw, latencies, throughput
from catenary_apps.bench.target import Point, Sweep, Swept
from catenary_apps.load import Conversation, LoadPlan, Target, Turn
from catenary_apps.load.results import Course, evaluate
from catenary_apps.load.statistics import Record


def _point(value: float | None, *, failing: int = 0, answered: int = 40) -> Point:
    """A run of 10 s."""
    generator = random.Random(f"point {value}")
    records = []
    for number in range(answered + failing):
        sent = generator.uniform(0, 9)
        moments = array("d", sorted(generator.uniform(sent, 10) for _ in range(5)))
        failed = number < failing
        records.append(
            Record(
                conversation=number,
                turn=0,
                due_s=sent,
                sent_s=sent,
                ended_s=moments[-1],
                moments=moments,
                prompt_tokens=3,
                cached_tokens=None,
                output_tokens=5,
                asked_tokens=5,
                failure="cut" if failed else None,
                detail="",
            )
        )
    plan = LoadPlan(target=Target(), conversations=[Conversation((Turn("a", 5),))])
    return Point(value, plan, evaluate(plan, "m", records, Course(10.0, 1.0)))


def test_histograms_have_every_request_and_the_percentiles(tmp_path: Path) -> None:
    point = _point(None)
    axes: list[Any] = latencies(point.result).axes
    assert [axis.get_title() for axis in axes[:2]] == ["time to first token", "time per output token"]
    for axis, count in zip(axes, (40, 40, 160, 40), strict=True):
        assert sum(patch.get_height() for patch in axis.patches) == count
    marked = [line.get_xdata()[0] for line in axes[0].lines]
    assert marked == [point.result.ttft_ms.median, point.result.ttft_ms.percentiles[99.0]]


def test_throughput_over_time_adds_up() -> None:
    axes: list[Any] = throughput(_point(None).result).axes
    upper, lower = axes
    assert sum(upper.patches[0].get_data().values) == pytest.approx(200)
    assert sum(lower.patches[0].get_data().values) == pytest.approx(40)


def test_a_percentile_among_failures_is_a_gap_in_the_curve() -> None:
    points = [_point(1.0), _point(2.0, failing=5), _point(4.0, failing=3, answered=0)]
    figure = curves(Sweep(Swept.RATE, (1.0, 2.0, 4.0)), points)
    by_label: dict[Any, Any] = {line.get_label(): line.get_ydata() for line in figure.axes[1].lines}
    assert [math.isnan(value) for value in by_label["p50"]] == [False, False, True]
    assert [math.isnan(value) for value in by_label["p99"]] == [False, True, True]
    assert list(by_label["p50"][:2]) == [point.result.ttft_ms.median for point in points[:2]]
    assert all(axis.get_ylim()[0] == 0 for axis in figure.axes)


def test_files_are_pictures(tmp_path: Path) -> None:
    draw(tmp_path, Sweep(Swept.CONCURRENCY, (8.0,)), [_point(8.0, failing=2, answered=0)])
    names = {"latencies-8", "throughput-8", "sweep"}
    assert {file.stem for file in tmp_path.iterdir()} == names
    for file in tmp_path.iterdir():
        with Image.open(file) as image:
            image.load()
            assert (image.format, image.size) == ("PNG", (1100, 770))
        assert file.stat().st_size < 60_000
    with pytest.raises(StartRefused, match="cannot be written"):
        draw(tmp_path / "missing", None, [_point(None)])
