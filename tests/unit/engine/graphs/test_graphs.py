"""Graphs on a device that captures: what is replayed, captured, run eagerly or chosen instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from services.engine.bucketing import Bucket
from services.engine.device import Device, Execution, ExecutionMode
from services.engine.device.cpu import CpuDevice
from services.engine.graphs import (
    BackgroundWarmUp,
    CaptureSchedule,
    Graphs,
    Key,
    Phase,
    Shape,
    WarmUp,
    WarmUpReport,
)
from services.engine.graphs.warmup import Dummy
from tests.support.graph_device import GraphDevice

SMALL, MIDDLE, LARGE = Bucket(1, 8, 0), Bucket(2, 8, 0), Bucket(4, 8, 0)


def row(key: Key) -> torch.Tensor:
    return torch.ones(key if isinstance(key, int) else key.batch * key.query)


def capture(graphs: Graphs, phase: Phase, key: Key, forward: Callable[..., Any]) -> None:
    with graphs.warming(phase, key, capture=True):
        graphs.run(phase, key, forward, (row(key),))


def test_a_replay_runs_no_python_and_reads_inputs_and_caches_anew() -> None:
    device = GraphDevice()
    graphs = Graphs(device, block_size=8)
    cache, calls = torch.zeros(8), []

    def forward(tensor: torch.Tensor) -> torch.Tensor:
        calls.append(tensor.shape)
        cache.add_(tensor)
        return cache * 2

    capture(graphs, Phase.PREFILL, SMALL, forward)
    ran = len(calls)
    cache.zero_()
    assert graphs.run(Phase.PREFILL, SMALL, forward, (torch.full((8,), 3.0),)).tolist() == [6.0] * 8
    assert graphs.run(Phase.PREFILL, SMALL, forward, (torch.full((8,), 1.0),)).tolist() == [8.0] * 8
    assert cache.tolist() == [4.0] * 8
    assert len(calls) == ran
    assert device.replays[0].count == 3


def test_on_demand_a_first_request_captures() -> None:
    device = GraphDevice()
    graphs = Graphs(device, block_size=8)
    graphs.serve()
    assert graphs.choose(Phase.PREFILL, SMALL) == SMALL
    for expected in (1, 1):
        graphs.run(Phase.PREFILL, SMALL, torch.neg, (row(SMALL),))
        assert (len(device.replays), graphs.first_seen) == (expected, 1)
    assert graphs.captured(Phase.PREFILL) == {SMALL}


def test_planned_captures_leave_the_rest_to_eager_and_the_nearest() -> None:
    device = GraphDevice()
    graphs = Graphs(device, block_size=8, on_demand=False)
    graphs.serve()
    assert graphs.choose(Phase.PREFILL, SMALL) == SMALL
    graphs.run(Phase.PREFILL, SMALL, torch.neg, (row(SMALL),))
    assert (len(device.replays), device.eager) == (0, 1)
    capture(graphs, Phase.PREFILL, LARGE, torch.neg)
    assert graphs.choose(Phase.PREFILL, SMALL) == LARGE
    # A nearer one takes over as soon as it is there.
    capture(graphs, Phase.PREFILL, MIDDLE, torch.neg)
    assert graphs.choose(Phase.PREFILL, SMALL) == MIDDLE
    assert graphs.choose(Phase.PREFILL, Bucket(1, 16, 0)) == Bucket(1, 16, 0)
    assert graphs.choose(Phase.DECODE, SMALL) == SMALL
    capture(graphs, Phase.PREFILL, SMALL, torch.neg)
    assert graphs.choose(Phase.PREFILL, SMALL) == SMALL


def test_an_eager_device_runs_each_bucket_as_it_is() -> None:
    graphs = Graphs(CpuDevice(1), block_size=8, on_demand=False)
    assert graphs.choose(Phase.PREFILL, SMALL) == SMALL
    assert graphs.run(Phase.PREFILL, SMALL, torch.neg, (row(SMALL),)).tolist() == [-1.0] * 8
    assert graphs.captured(Phase.PREFILL) == frozenset()


def test_shapes_count_by_the_tensors_and_not_by_the_bucket() -> None:
    graphs = Graphs(CpuDevice(1), block_size=8)
    graphs.run(Phase.PREFILL, SMALL, torch.neg, (torch.ones(8),))
    assert graphs.first_seen == 0
    graphs.serve()
    graphs.run(Phase.PREFILL, SMALL, torch.neg, (torch.ones(8),))
    assert graphs.first_seen == 0
    # The same bucket and another shape, another dtype, another phase.
    graphs.run(Phase.PREFILL, SMALL, torch.neg, (torch.ones(9),))
    graphs.run(Phase.PREFILL, SMALL, torch.neg, (torch.ones(8, dtype=torch.float64),))
    graphs.run(Phase.HEAD, 8, torch.neg, (torch.ones(8),))
    assert graphs.first_seen == 3


class Recompiling(Execution):
    """Calls the compiler again for every third run."""

    runs = 0

    def run_eagerly(self, forward: Any, tensors: Any) -> Any:
        self.runs += 1
        return super().run_eagerly(forward, tensors)

    def compilations(self) -> int:
        return self.runs // 3


def test_a_compilation_behind_our_back_counts_as_a_first_seen_shape(
    capsys: pytest.CaptureFixture[str],
) -> None:
    device = CpuDevice(1)
    device.execution = Recompiling()
    graphs = Graphs(device, block_size=8)
    graphs.run(Phase.PREFILL, SMALL, torch.neg, (row(SMALL),))
    graphs.serve()
    graphs.complete()
    for _ in range(5):
        graphs.run(Phase.PREFILL, SMALL, torch.neg, (row(SMALL),))
    assert graphs.first_seen == 2
    assert "prefill batch_size:1 query_len:8 num_blocks:0" in capsys.readouterr().out


def fails_above(limit: int) -> Callable[[Any], bool]:
    return lambda tensors: tensors[0].shape[0] > limit


def test_a_capture_without_memory_runs_eagerly_and_is_not_tried_again() -> None:
    device = GraphDevice(fails=fails_above(8))
    graphs = Graphs(device, block_size=8)
    for _ in range(2):
        assert graphs.run(Phase.PREFILL, LARGE, torch.neg, (row(LARGE),)).shape == (32,)
    assert device.eager == 2
    assert graphs.captured(Phase.PREFILL) == frozenset()


def test_a_defect_in_a_forward_is_not_taken_for_a_lack_of_memory() -> None:
    def broken(tensor: torch.Tensor) -> torch.Tensor:
        raise ValueError("a defect")

    graphs = Graphs(GraphDevice(), block_size=8)
    with pytest.raises(ValueError, match="a defect"):
        graphs.run(Phase.PREFILL, SMALL, broken, (row(SMALL),))


def shapes(*keys: Bucket) -> list[Shape]:
    return [Shape(Phase.PREFILL, key, key.batch * key.query) for key in keys]


def warm_up(
    device: Device,
    *keys: Bucket,
    eager: tuple[Bucket, ...] = (),
    budget: int | None = None,
    dummy: Dummy | None = None,
    on_end: Callable[[WarmUpReport], None] = lambda _: None,
) -> WarmUp:
    graphs = Graphs(device, block_size=8, on_demand=False)

    def run(phase: Phase, key: Key) -> None:
        graphs.run(phase, key, torch.neg, (row(key),))

    schedule = CaptureSchedule(shapes(*keys), [], budget=budget, prompt_ratio=1.0)
    warm = WarmUp(graphs, device.memory, dummy or run, schedule, shapes(*eager), on_end=on_end)
    warm.graphs = graphs  # type: ignore[attr-defined]
    return warm


def test_warm_up_captures_measures_and_tells_what_it_leaves_out() -> None:
    # 10 bytes an element: 80 for SMALL and 160 for MIDDLE, then 320 predicted and 160 left.
    device = GraphDevice(cost=lambda tensors: 10 * tensors[0].numel(), fails_eagerly=fails_above(40))
    reports: list[WarmUpReport] = []
    warm = warm_up(device, SMALL, MIDDLE, LARGE, eager=(Bucket(8, 8, 0),), budget=400, on_end=reports.append)
    told: list[tuple[int, int]] = []
    warm.run(lambda done, total: told.append((done, total)))
    report = warm.report
    assert reports == [report]
    assert [shape.key for shape in report.captured] == [SMALL, MIDDLE]
    assert [shape.key for shape in report.over_budget] == [LARGE]
    assert [shape.key for shape in report.eager] == [LARGE]
    assert [shape.key for shape in report.unusable] == [Bucket(8, 8, 0)]
    assert (report.graph_bytes, report.missing_bytes) == (240, 320)
    assert told[0] == (0, 4)
    assert not warm.pending
    assert not warm.step()


def test_without_memory_for_a_capture_warm_up_goes_on() -> None:
    device = GraphDevice(fails=fails_above(8))
    warm = warm_up(device, SMALL, LARGE, MIDDLE, Bucket(1, 4, 0))
    warm.run(lambda done, total: None)
    assert [shape.key for shape in warm.report.captured] == [SMALL, Bucket(1, 4, 0)]
    assert {shape.key for shape in warm.report.out_of_memory} == {LARGE, MIDDLE}
    # They were run all the same, so that none of their shapes is new to a request.
    assert {shape.key for shape in warm.report.eager} == {LARGE, MIDDLE}


def test_beside_serving_warm_up_takes_at_most_half_of_the_time() -> None:
    now = [0.0]
    warm = warm_up(GraphDevice(), SMALL, MIDDLE, LARGE)
    step = warm.step

    def slow_step() -> bool:
        now[0] += 10
        return step()

    warm.step = slow_step  # type: ignore[method-assign]
    background = BackgroundWarmUp(warm, clock=lambda: now[0])
    assert background.turn(busy=True)
    now[0] += 9
    assert not background.turn(busy=True)
    now[0] += 1
    assert background.turn(busy=True)
    # An idle engine has nothing better to do.
    assert background.turn(busy=False)
    assert (background.done, background.total) == (3, 3)
    assert background.turn(busy=False)
    assert not background.pending
    assert not background.turn(busy=False)


def test_a_defect_ends_the_warm_up_beside_serving_and_not_the_engine() -> None:
    def broken(phase: Phase, key: Key) -> None:
        raise ValueError("a defect")

    warm = warm_up(GraphDevice(), SMALL, MIDDLE, dummy=broken)
    background = BackgroundWarmUp(warm)
    assert background.turn(busy=False)
    assert not background.pending


def test_the_mode_tells_whether_there_is_something_to_capture() -> None:
    assert [mode.captures for mode in ExecutionMode] == [True, True, False, False]
