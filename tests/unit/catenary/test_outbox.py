"""The outbox of a stream: nothing is lost, the order and the latest message of each key hold, bounds hold."""

from __future__ import annotations

import asyncio
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from catenary.columns import MAX_STEP_WEIGHT, StepRow, split
from catenary.outbox import Messages, Outbox, Steps
from catenary.v1 import common_pb2


def _outbox(lanes: int, limit: int | None = None) -> tuple[Outbox[str], list[Messages[str]]]:
    made = [Messages[str]() for _ in range(lanes)]
    return Outbox(*made, limit=limit), made


def test_lanes_go_one_before_the_other_and_each_in_its_order() -> None:
    outbox, (urgent, later) = _outbox(2)
    outbox.put(later, "c")
    outbox.put(later, "d")
    outbox.put(urgent, "a")
    assert outbox.pop() == "a"
    outbox.put(urgent, "b")
    assert outbox.take() == ["b", "c", "d"]
    assert outbox.pop() is None
    assert outbox.empty


def test_the_latest_message_of_a_key_counts_in_the_place_of_the_first() -> None:
    outbox, (lane,) = _outbox(1)
    outbox.put(lane, "old", 1)
    outbox.put(lane, "other", 2)
    outbox.put(lane, "new", 1)
    outbox.put(lane, "without a key")
    outbox.put(lane, "without a key")
    assert outbox.take() == ["new", "other", "without a key", "without a key"]
    outbox.put(lane, "again", 1)
    assert outbox.take() == ["again"]


def test_a_message_is_taken_back_while_it_waits() -> None:
    outbox, (lane,) = _outbox(1)
    outbox.put(lane, "a", 1)
    outbox.put(lane, "b", 2)
    assert lane.take_back(1)
    assert not lane.take_back(1)
    assert outbox.pop() == "b"
    assert not lane.take_back(2)


def test_first_rows_go_before_others_and_merge_like_them() -> None:
    steps = Steps(lambda step: step)
    steps.add(StepRow(1, [10]))
    steps.add(StepRow(2, [20]), first=True)
    steps.row(2).token_ids.append(21)
    steps.row(3, first=True).token_ids.append(30)
    steps.row(1).token_ids.append(11)
    assert (len(steps), steps.has_first) == (3, True)
    assert [(row.handle, row.token_ids) for row in split(steps.pop())] == [(2, [20, 21]), (3, [30])]
    assert not steps.has_first
    assert [(row.handle, row.token_ids) for row in split(steps.pop())] == [(1, [10, 11])]
    assert not steps


def test_an_end_stays_with_the_row_that_it_is_merged_into() -> None:
    steps, end = Steps(lambda step: step), common_pb2.SequenceEnd(reason=common_pb2.FINISH_REASON_STOP)
    steps.add(StepRow(1, [10]), first=True)
    steps.add(StepRow(1, [11], end=end))
    (row,) = split(steps.pop())
    assert (row.token_ids, row.end is not None and row.end.reason) == (
        [10, 11],
        common_pb2.FINISH_REASON_STOP,
    )


async def test_a_writer_waits_for_messages_and_gets_them_all_before_the_end() -> None:
    outbox, (lane,) = _outbox(1)
    got: list[str] = []

    async def write() -> None:
        while (message := await outbox.next()) is not None:
            got.append(message)

    writer = asyncio.create_task(write())
    await asyncio.sleep(0)
    for message in "ab":
        outbox.put(lane, message)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert got == ["a", "b"]
    outbox.put(lane, "c")
    outbox.close(flush=True)
    await asyncio.wait_for(writer, 5)
    assert got == ["a", "b", "c"]
    assert outbox.closed


async def test_a_closed_outbox_without_flush_sends_nothing_more() -> None:
    outbox, (lane,) = _outbox(1, limit=1)
    outbox.put(lane, "a")
    outbox.close()
    outbox.put(lane, "b")
    await asyncio.wait_for(outbox.ready(), 5)
    assert (outbox.pop(), outbox.take(), await outbox.next()) == (None, [], None)
    # Also not after it was closed with flush.
    outbox, (lane,) = _outbox(1)
    outbox.put(lane, "a")
    outbox.close(flush=True)
    outbox.close()
    assert await outbox.next() is None


async def test_a_producer_waits_for_room() -> None:
    outbox, (lane,) = _outbox(1, limit=2)
    outbox.put(lane, "a")
    await asyncio.wait_for(outbox.room(), 5)
    outbox.put(lane, "b")
    assert outbox.full
    waiting = asyncio.create_task(outbox.room())
    await asyncio.sleep(0)
    assert not waiting.done()
    outbox.pop()
    await asyncio.wait_for(waiting, 5)
    outbox.put(lane, "c")
    waiting = asyncio.create_task(outbox.room())
    await asyncio.sleep(0)
    outbox.clear()
    await asyncio.wait_for(waiting, 5)
    for message in "de":
        outbox.put(lane, message)
    waiting = asyncio.create_task(outbox.room())
    await asyncio.sleep(0)
    outbox.close(flush=True)
    await asyncio.wait_for(waiting, 5)
    assert outbox.take() == ["d", "e"]


async def test_taking_everything_makes_the_writer_wait_again() -> None:
    outbox, (lane,) = _outbox(1)
    outbox.put(lane, "a")
    await asyncio.wait_for(outbox.ready(), 5)
    assert outbox.take() == ["a"]
    waiting = asyncio.create_task(outbox.ready())
    await asyncio.sleep(0)
    assert not waiting.done()
    outbox.wake()
    await asyncio.wait_for(waiting, 5)


@given(
    st.lists(
        st.tuples(st.integers(1, 5), st.booleans(), st.lists(st.integers(0, 99), max_size=4), st.booleans()),
        max_size=30,
    )
)
def test_no_token_is_lost_and_those_of_a_sequence_keep_their_order(
    rows: list[tuple[int, bool, list[int], bool]],
) -> None:
    steps, want, got = Steps(lambda step: step), dict[int, list[int]](), dict[int, list[int]]()

    def read() -> None:
        first = steps.has_first
        for row in split(steps.pop()):
            assert first == (row.handle not in got)
            got.setdefault(row.handle, []).extend(row.token_ids)

    for handle, whole, tokens, reads in rows:
        first = handle not in want
        want.setdefault(handle, []).extend(tokens)
        if whole:
            steps.add(StepRow(handle, list(tokens)), first=first)
        else:
            steps.row(handle, first=first).token_ids.extend(tokens)
        if reads:
            read()
    while steps:
        read()
    assert got == want


@given(st.lists(st.integers(1, MAX_STEP_WEIGHT), max_size=4))
def test_a_message_of_many_rows_is_of_moderate_size(sizes: list[int]) -> None:
    steps = Steps(lambda step: step)
    for handle, size in enumerate(sizes):
        steps.add(StepRow(handle, [7] * size))
    handles: list[int] = []
    while steps:
        step = steps.pop()
        assert len(step.handles) == 1 or len(step.handles) + len(step.token_ids) <= MAX_STEP_WEIGHT
        handles += step.handles
    assert handles == list(range(len(sizes)))


LANES, LIMIT = 3, 6


class OutboxMachine(RuleBasedStateMachine):
    """An outbox beside a list of what waits in it. Messages are (lane, key, number)."""

    def __init__(self) -> None:
        super().__init__()
        self.lanes = [Messages[tuple[int, int | None, int]]() for _ in range(LANES)]
        self.outbox = Outbox(*self.lanes, limit=LIMIT)
        self.waiting: list[tuple[int, int | None, int]] = []
        self.number = 0

    @precondition(lambda self: not self.outbox.full)
    @rule(lane=st.integers(0, LANES - 1), key=st.one_of(st.none(), st.integers(0, 2)))
    def put(self, lane: int, key: int | None) -> None:
        self.number += 1
        message = (lane, key, self.number)
        self.outbox.put(self.lanes[lane], message, key)
        same = [index for index, one in enumerate(self.waiting) if key is not None and one[:2] == (lane, key)]
        if same:
            self.waiting[same[0]] = message
        else:
            self.waiting.append(message)

    @rule(lane=st.integers(0, LANES - 1), key=st.integers(0, 2))
    def take_back(self, lane: int, key: int) -> None:
        found = [one for one in self.waiting if one[:2] == (lane, key)]
        assert self.lanes[lane].take_back(key) == bool(found)
        self.waiting = [one for one in self.waiting if one not in found]

    @rule()
    def pop(self) -> None:
        expected = min(self.waiting, key=lambda one: one[0], default=None)
        assert self.outbox.pop() == expected
        if expected is not None:
            self.waiting.remove(expected)

    @rule()
    def take(self) -> None:
        assert self.outbox.take() == sorted(self.waiting, key=lambda one: one[0])
        self.waiting = []

    @invariant()
    def bounds_hold(self) -> None:
        assert self.outbox.unread == len(self.waiting) <= LIMIT
        assert self.outbox.full == (len(self.waiting) == LIMIT)
        assert self.outbox.empty != bool(self.waiting)
        assert Counter(map(len, self.lanes)) == Counter(
            sum(one[0] == lane for one in self.waiting) for lane in range(LANES)
        )


TestOutbox = OutboxMachine.TestCase
