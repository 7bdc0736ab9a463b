"""Tasks that wait for a worker: whose turn it is, and who has to go when there are too many."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.tokenizer.workers.pool import Turns, Waiting


def turns_of(*given: tuple[str, bool], most: int = 1000, most_bytes: int = 1000) -> Turns[int]:
    turns: Turns[int] = Turns(most=most, most_bytes=most_bytes)
    for number, (tenant, long) in enumerate(given):
        turns.add(Waiting(tenant, 1, number, long=long))
    return turns


def taken(turns: Turns[int], *, long: bool = True) -> list[int]:
    found = []
    while (waiting := turns.next(long=long)) is not None:
        found.append(waiting.what)
    return found


def test_tenants_take_turns_and_keep_their_order() -> None:
    turns = turns_of(*[("a", False)] * 4, *[("b", False)] * 2)
    assert taken(turns) == [0, 4, 1, 5, 2, 3]
    assert not len(turns)


def test_long_tasks_wait_until_they_are_asked_for() -> None:
    turns = turns_of(("a", True), ("a", False), ("b", True), ("a", False))
    assert taken(turns, long=False) == [1, 3]
    assert taken(turns) == [0, 2]


def test_the_lanes_alternate() -> None:
    turns = turns_of(*[("a", True)] * 3, *[("a", False)] * 3)
    assert taken(turns) == [0, 3, 1, 4, 2, 5]


def test_whoever_has_most_loses_the_last() -> None:
    turns = turns_of(*[("a", False)] * 3, most=3)
    newcomer = Waiting("b", 1, 3, long=False)
    turns.add(newcomer)
    surplus = turns.surplus(newcomer)
    assert surplus is not None
    assert (surplus.tenant, surplus.what) == ("a", 2)
    another = Waiting("a", 1, 4, long=False)
    turns.add(another)
    assert turns.surplus(another) is another
    assert turns.surplus(another) is None
    assert taken(turns) == [0, 3, 1]


def test_texts_are_bounded_together() -> None:
    turns = turns_of(("a", False), most_bytes=100)
    large = Waiting("b", 100, 1, long=True)
    turns.add(large)
    assert turns.surplus(large) is large


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 40), st.booleans()), max_size=60),
    st.integers(1, 8),
)
def test_no_tenant_is_turned_away_for_what_another_has_more_of(
    arrivals: list[tuple[str, int, bool]], most: int
) -> None:
    turns: Turns[int] = Turns(most=most, most_bytes=100)
    held: dict[int, Waiting[int]] = {}
    for number, (tenant, size, long) in enumerate(arrivals):
        newest = Waiting(tenant, size, number, long=long)
        turns.add(newest)
        held[number] = newest
        while (gone := turns.surplus(newest)) is not None:
            too_many = len(held) > most
            weight = {
                name: sum(1 if too_many else one.size for one in held.values() if one.tenant == name)
                for name in "abc"
            }
            assert weight[gone.tenant] == max(weight.values())
            del held[gone.what]
            if gone is newest:
                break
        assert len(turns) == len(held) <= most
        assert sum(one.size for one in held.values()) <= 100
    assert sorted(taken(turns)) == sorted(held)
