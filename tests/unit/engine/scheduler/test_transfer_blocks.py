"""Blocks of no sequence: kept for other engines, or for what they have. Given up before anybody starves."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.domain import FinishReason
from services.engine.scheduler import Finished, IncomingPrefix, Scheduler, Sequence, prompt_name
from tests.support.scheduling import BLOCK, commit, make_scheduler, make_sequence

LENGTHS = (2, BLOCK, BLOCK + 1, 14, 30)


class World:
    """A scheduler that is driven step by step, with two in flight at times."""

    def __init__(self, blocks: int, *, caching: bool) -> None:
        self.scheduler, self.pool = make_scheduler(blocks, prefix_caching=caching)
        self.live: dict[int, Sequence] = {}
        self.expected: dict[int, tuple[Sequence, IncomingPrefix]] = {}
        self.plans: list[object] = []
        self.computed: dict[int, int] = {}

    def step(self) -> None:
        plan = self.scheduler.plan() if len(self.plans) < 2 else None
        if plan is not None:
            self.plans.append(plan)
            for chunk in plan.prefills:
                key = chunk.sequence.key
                self.computed[key] = self.computed.get(key, 0) + chunk.length

    def commit(self) -> None:
        if self.plans:
            plan = self.plans.pop(0)
            for outcome in commit(self.scheduler, plan):  # type: ignore[arg-type]
                if isinstance(outcome, Finished):
                    del self.live[outcome.sequence.key]

    def run(self) -> None:
        for _ in range(3000):
            if not self.live and not self.plans:
                return
            self.step()
            self.commit()
        raise AssertionError("sequences starve")

    def submit(self, key: int, length: int, *, hands_over: bool) -> None:
        sequence = make_sequence(key, length, max_tokens=1 if hands_over else 6)
        sequence.hands_over = hands_over
        self.live[key] = sequence
        self.scheduler.add(sequence)

    def expect(self, key: int, length: int) -> None:
        sequence = make_sequence(key, length, max_tokens=6)
        expected = self.scheduler.expect(sequence)
        if expected is not None:
            self.expected[key] = sequence, expected

    def arrive(self, key: int) -> None:
        sequence, expected = self.expected.pop(key)
        there = self.scheduler.arrived(sequence, expected)
        assert there == (self.scheduler.transfer_blocks.table(key) is expected.blocks)
        self.live[key] = sequence
        self.scheduler.add(sequence)


def play(world: World, what: str, number: int) -> None:
    known = {*world.live, *world.expected, *world.computed}
    length = LENGTHS[number % len(LENGTHS)]
    match what:
        case "submit" | "hand over" if number not in known:
            world.submit(number, length, hands_over=what == "hand over")
        case "expect" if number not in known:
            world.expect(number, length)
        case "arrive" if number in world.expected:
            world.arrive(number)
        case "drop" if number in world.expected:
            del world.expected[number]
            world.scheduler.transfer_blocks.release(number)
        case "abort" if number in world.live:
            world.scheduler.end(number, FinishReason.ABORT)
            del world.live[number]
        case "fetched":
            world.scheduler.transfer_blocks.release(number)
        case "step":
            world.step()
        case "commit":
            world.commit()


EVENTS = ["submit", "hand over", "expect", "arrive", "arrive", "drop", "abort", "fetched"]


@given(
    st.lists(
        st.tuples(st.sampled_from([*EVENTS, *["step", "commit"] * 4]), st.integers(0, 14)), max_size=120
    ),
    st.integers(20, 40),
    st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_nobody_starves_and_no_block_is_lost(
    script: list[tuple[str, int]], blocks: int, caching: bool
) -> None:
    world = World(blocks, caching=caching)
    for what, number in script:
        play(world, what, number)
        world.scheduler.check()
    for key in list(world.expected):
        world.arrive(key)
    world.run()
    while world.scheduler.transfer_blocks.give_up():
        pass
    world.scheduler.check()
    assert world.pool.used == 0


def arrived(
    scheduler: Scheduler, key: int, length: int, max_tokens: int = 6
) -> tuple[Sequence, IncomingPrefix]:
    sequence = make_sequence(key, length, max_tokens=max_tokens)
    expected = scheduler.expect(sequence)
    assert expected is not None
    assert scheduler.arrived(sequence, expected)
    scheduler.add(sequence)
    return sequence, expected


def test_what_arrived_is_not_computed() -> None:
    for length in LENGTHS:
        world = World(40, caching=True)
        sequence, expected = arrived(world.scheduler, 1, length)
        world.live[1] = sequence
        assert len(expected.blocks) == -(-(length - 1) // BLOCK)
        world.run()
        assert world.computed == {}
        assert sequence.num_transferred_tokens == length - 1
        # Full blocks can be hit afterwards: they are not expected again.
        again = world.scheduler.expect(make_sequence(2, length))
        assert again is not None
        assert again.hits == (length - 1) // BLOCK


def test_what_arrived_is_given_up_for_those_that_run() -> None:
    world = World(16, caching=False)
    sequence, _ = arrived(world.scheduler, 1, 30)
    world.live[1] = sequence
    assert world.scheduler.shared.give_up()
    assert (world.scheduler.provided, world.scheduler.forfeited) == (0, 1)
    world.run()
    assert world.computed == {1: 30}
    assert sequence.num_transferred_tokens == 0
    assert (world.scheduler.provided, world.scheduler.forfeited) == (0, 1)


def test_one_that_gives_way_has_had_its_kv() -> None:
    """What it computes anew later does not change what was there when it started."""
    world = World(16, caching=False)
    sequence, _ = arrived(world.scheduler, 1, 30, max_tokens=30)
    world.live[1] = sequence
    world.step()
    assert (world.scheduler.provided, sequence.num_transferred_tokens) == (1, 29)
    urgent = make_sequence(2, 24, max_tokens=30, priority=-9)
    world.live[2] = urgent
    world.scheduler.add(urgent)
    world.run()
    assert sequence.num_preemptions > 0
    assert world.computed[1] > 0
    assert (world.scheduler.provided, world.scheduler.forfeited) == (1, 0)
    assert sequence.num_transferred_tokens == 29


def test_names_tell_prompts_and_salts_apart() -> None:
    names = {
        prompt_name(make_sequence(1, 9, first_token=first, salt=salt), tokens, size)
        for first, tokens in ((1, 3), (2, 3), (1, 2), (1, 4))
        for salt in (b"", b"a")
        for size in (2, 3)
    }
    assert len(names) == 16


def test_too_few_blocks_are_none() -> None:
    scheduler, pool = make_scheduler(16)
    held = pool.allocate(10)
    assert scheduler.expect(make_sequence(1, 30)) is None
    assert pool.used == len(held)


def test_a_prompt_for_others_keeps_its_blocks_until_they_are_needed() -> None:
    world = World(16, caching=False)
    world.submit(1, 30, hands_over=True)
    world.run()
    assert world.pool.used == 8
    world.submit(2, 50, hands_over=False)
    world.run()
    assert world.pool.used == 0
