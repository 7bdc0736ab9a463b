"""Execution modes, the order of captures and their budget, on scripted costs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.engine.bucketing import Bucket
from services.engine.device import ExecutionMode, execution_mode
from services.engine.graphs import (
    CaptureOrder,
    CaptureSchedule,
    PaddingCounter,
    Phase,
    Purse,
    Shape,
    count_shapes,
    name_of,
    shapes_in_order,
    size_of,
    split_long,
)

GRAPH, COMPILE, LAZY, EAGER = ExecutionMode


@pytest.mark.parametrize(
    ("device", "lazy", "compiled", "enforce_eager", "mode"),
    [
        ("hpu", None, False, False, COMPILE),
        ("hpu", "0", False, False, COMPILE),
        ("hpu", "0", True, False, COMPILE),
        ("hpu", "0", False, True, EAGER),
        ("hpu", None, False, True, EAGER),
        ("hpu", "1", False, False, GRAPH),
        ("hpu", "1", False, True, LAZY),
        ("cuda", None, False, False, GRAPH),
        ("cuda", None, False, True, EAGER),
        ("cuda", None, True, False, COMPILE),
        ("cpu", None, False, False, EAGER),
        ("cpu", None, False, True, EAGER),
        ("cpu", None, True, False, COMPILE),
        # Habana's variable means nothing elsewhere.
        ("cpu", "1", True, False, COMPILE),
        ("cuda", "1", False, False, GRAPH),
    ],
)
def test_execution_mode(
    device: str, lazy: str | None, compiled: bool, enforce_eager: bool, mode: ExecutionMode
) -> None:
    assert execution_mode(device, compiled=compiled, enforce_eager=enforce_eager, lazy=lazy) is mode


@pytest.mark.parametrize(
    ("device", "lazy", "enforce_eager", "message"),
    [
        ("cpu", None, True, "compile and enforce-eager exclude"),
        ("hpu", "0", True, "compile and enforce-eager exclude"),
        ("hpu", "1", False, "compile and PT_HPU_LAZY_MODE=1 exclude"),
        ("hpu", "yes", False, "PT_HPU_LAZY_MODE must be 0 or 1, not 'yes'"),
    ],
)
def test_contradictions_are_refused(device: str, lazy: str | None, enforce_eager: bool, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        execution_mode(device, compiled=True, enforce_eager=enforce_eager, lazy=lazy)


def test_sizes_are_padded_tokens_and_names_are_those_people_grep() -> None:
    assert size_of(Phase.PREFILL, Bucket(2, 128, 3), 16) == 2 * (128 + 48)
    assert size_of(Phase.DECODE, Bucket(4, 1, 10), 16) == 4 + 160
    assert size_of(Phase.HEAD, 8, 16) == 8
    assert name_of(Phase.PREFILL, Bucket(4, 1792, 0)) == "prefill batch_size:4 query_len:1792 num_blocks:0"
    assert name_of(Phase.HEAD, 8) == "head count:8"


PREFILLS = [Bucket(1, 128, 0), Bucket(1, 128, 4), Bucket(1, 256, 0), Bucket(2, 128, 0), Bucket(4, 128, 0)]
DECODES = [Bucket(1, 1, 4), Bucket(1, 1, 8), Bucket(4, 1, 4), Bucket(4, 1, 16), Bucket(2, 1, 32)]


@pytest.mark.parametrize(
    ("phase", "order", "expected"),
    [
        # Least tokens; of equals the shorter, then the smaller batch.
        (
            Phase.PREFILL,
            CaptureOrder.MIN_TOKENS,
            [
                Bucket(1, 128, 0),
                Bucket(1, 128, 4),
                Bucket(2, 128, 0),
                Bucket(1, 256, 0),
                Bucket(4, 128, 0),
            ],
        ),
        # The largest batch; of equals the shorter.
        (
            Phase.DECODE,
            CaptureOrder.MAX_BS,
            [Bucket(4, 1, 4), Bucket(4, 1, 16), Bucket(2, 1, 32), Bucket(1, 1, 4), Bucket(1, 1, 8)],
        ),
        (
            Phase.DECODE,
            CaptureOrder.LARGEST_FIRST,
            [Bucket(2, 1, 32), Bucket(4, 1, 16), Bucket(1, 1, 8), Bucket(4, 1, 4), Bucket(1, 1, 4)],
        ),
    ],
)
def test_order_of_captures(phase: Phase, order: CaptureOrder, expected: list[Bucket]) -> None:
    buckets = PREFILLS if phase is Phase.PREFILL else DECODES
    assert [shape.key for shape in shapes_in_order(phase, buckets, order, 16)] == expected


def test_long_prefills_bypass_capture() -> None:
    shapes = shapes_in_order(Phase.PREFILL, PREFILLS, CaptureOrder.MIN_TOKENS, 16)
    kept, long = split_long(shapes, 200)
    # 128; 128 + 4 * 16; above the limit are 2 * 128, 256 and 4 * 128.
    assert [shape.key for shape in kept] == [Bucket(1, 128, 0), Bucket(1, 128, 4)]
    assert len(long) == 3


def test_a_purse_predicts_by_size_share_of_the_same_phase() -> None:
    purse = Purse(100)
    decode, head = Shape(Phase.DECODE, Bucket(1, 1, 9), 10), Shape(Phase.HEAD, 1, 1)
    assert purse.allows(decode)
    purse.charge(decode, 20)
    assert purse.predict(Shape(Phase.DECODE, Bucket(1, 1, 4), 5)) == 10
    assert purse.predict(head) == 0
    purse.charge(head, 30)
    assert purse.predict(decode) == 20
    # As much as is left is too much.
    assert purse.allows(Shape(Phase.DECODE, Bucket(1, 1, 8), 24))
    assert not purse.allows(Shape(Phase.DECODE, Bucket(1, 1, 8), 25))


def prefills(*sizes: int) -> list[Shape]:
    return [Shape(Phase.PREFILL, Bucket(1, size, 0), size) for size in sizes]


def decodes(*sizes: int) -> list[Shape]:
    return [Shape(Phase.DECODE, Bucket(1, 1, size), size) for size in sizes]


def play(schedule: CaptureSchedule, cost: Callable[[Shape], int | None]) -> list[tuple[str, int]]:
    """Captures all that the schedule offers; a cost of None is a device without memory."""
    taken: list[tuple[str, int]] = []
    while (shape := schedule.next()) is not None:
        paid = cost(shape)
        if paid is None:
            schedule.failed(shape)
        else:
            schedule.captured(shape, paid)
            taken.append((shape.phase.value, shape.size))
    return taken


def test_each_phase_has_its_share_and_what_is_left_is_lent() -> None:
    # 1000 bytes, 300 of them for prefills at 1 a token: 100 + 150 fit, the next, 200, would need 200 of 50.
    # Decodes cost a tenth: 100 + 200 + 400 take 70 of their 700. The other 630 go to the prefills: 200 and
    # 400 fit into 50 + 630, 500 does not fit into the 80 that are left then.
    schedule = CaptureSchedule(
        prefills(100, 150, 200, 400, 500), decodes(100, 200, 400), budget=1000, prompt_ratio=0.3
    )
    taken = play(schedule, lambda shape: shape.size if shape.phase is Phase.PREFILL else shape.size // 10)
    assert taken == [
        ("prefill", 100),
        ("prefill", 150),
        ("decode", 100),
        ("decode", 200),
        ("decode", 400),
        ("prefill", 200),
        ("prefill", 400),
    ]
    assert [shape.size for shape in schedule.over_budget] == [500]
    assert schedule.missing_bytes() == 500


def test_prefill_lends_to_decode_too() -> None:
    # Prefills use 100 of 500, and decodes want 600 where 500 are theirs.
    schedule = CaptureSchedule(prefills(100), decodes(300, 200, 100), budget=1000, prompt_ratio=0.5)
    assert [size for _, size in play(schedule, lambda shape: shape.size)] == [100, 300, 100, 200]
    assert schedule.over_budget == ()


def test_without_a_budget_all_is_captured() -> None:
    schedule = CaptureSchedule(prefills(5, 6), decodes(7), budget=None, prompt_ratio=0.3)
    assert len(play(schedule, lambda shape: 10**12)) == 3
    assert schedule.total == 3
    assert schedule.missing_bytes() == 0


def test_what_is_as_large_as_a_failure_is_not_tried() -> None:
    schedule = CaptureSchedule(prefills(1, 2, 8, 9, 3), decodes(9), budget=None, prompt_ratio=0.3)
    tried: list[int] = []

    def cost(shape: Shape) -> int | None:
        tried.append(shape.size)
        return None if shape.size >= 8 and shape.phase is Phase.PREFILL else 1

    assert play(schedule, cost) == [("prefill", 1), ("prefill", 2), ("prefill", 3), ("decode", 9)]
    assert tried == [1, 2, 8, 3, 9]
    assert sorted(shape.size for shape in schedule.out_of_memory) == [8, 9]


@given(
    st.lists(st.integers(1, 1000), max_size=30),
    st.lists(st.integers(1, 1000), max_size=30),
    st.integers(0, 20_000),
    st.floats(0, 1),
)
def test_every_shape_is_captured_or_named_once_and_the_budget_holds(
    first: list[int], second: list[int], budget: int, ratio: float
) -> None:
    shapes = [Shape(Phase.PREFILL, index, size) for index, size in enumerate(first)]
    rest = [Shape(Phase.DECODE, index, size) for index, size in enumerate(second)]
    schedule = CaptureSchedule(shapes, rest, budget=budget, prompt_ratio=ratio)
    taken: list[Shape] = []
    while (shape := schedule.next()) is not None:
        schedule.captured(shape, shape.size)
        taken.append(shape)
    named = [*taken, *schedule.over_budget]
    assert sorted((s.phase.value, str(s.key)) for s in named) == sorted(
        (s.phase.value, str(s.key)) for s in [*shapes, *rest]
    )
    # Costs are as predicted, so that only the first capture of a phase can exceed its share.
    excess = max(first[:1] + second[:1], default=0)
    assert sum(shape.size for shape in taken) < budget + 2 * excess + 1


def test_padding_is_what_was_computed_beyond_the_real_work() -> None:
    counter = PaddingCounter()
    counter.add(Phase.PREFILL, Bucket(4, 128, 2), tokens=300, blocks=5)
    counter.add(Phase.DECODE, Bucket(8, 1, 64), tokens=6, blocks=40)
    counter.add(Phase.DECODE, Bucket(8, 1, 64), tokens=8, blocks=64)
    assert (counter.prefill.tokens, counter.prefill.padding_tokens) == (300, 212)
    assert (counter.prefill.blocks, counter.prefill.padding_blocks) == (5, 3)
    assert (counter.decode.tokens, counter.decode.padding_tokens) == (14, 2)
    assert (counter.decode.blocks, counter.decode.padding_blocks) == (104, 24)


def test_counts_are_shapes_too() -> None:
    assert [(s.key, s.size) for s in count_shapes(Phase.HEAD, [4, 1, 2])] == [(1, 1), (2, 2), (4, 4)]
