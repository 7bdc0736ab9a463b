"""The KV index against a naive one, and its bound."""

from __future__ import annotations

from itertools import takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.index import KvIndex

ENGINES = [f"e{number}" for number in range(12)]
NAMES = [bytes([number]) * 16 for number in range(24)]

engines = st.sampled_from(ENGINES)
names = st.lists(st.sampled_from(NAMES), max_size=10)
events = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["stored", "removed", "replace"]), engines, names),
        st.tuples(st.sampled_from(["cleared", "forget"]), engines),
    ),
    max_size=60,
)


def naive(index: dict[str, set[bytes]], event: tuple) -> None:
    kind, engine, *rest = event
    held = index.setdefault(engine, set())
    match kind:
        case "stored":
            held.update(*rest)
        case "removed":
            held.difference_update(*rest)
        case "replace":
            index[engine] = set(*rest)
        case _:
            held.clear()


def expected_match(index: dict[str, set[bytes]], chain: list[bytes]) -> dict[str, int]:
    lengths = {engine: len(list(takewhile(held.__contains__, chain))) for engine, held in index.items()}
    return {engine: length for engine, length in lengths.items() if length}


@given(events, st.lists(st.lists(st.sampled_from(NAMES), unique=True, max_size=20), max_size=4))
@settings(max_examples=150)
def test_it_equals_a_naive_index(history, chains):
    index: KvIndex[str] = KvIndex(10_000)
    model: dict[str, set[bytes]] = {}
    for event in history:
        getattr(index, event[0])(*event[1:])
        naive(model, event)
        assert index.pairs == sum(map(len, model.values()))
    for engine in ENGINES:
        assert index.blocks(engine) == len(model.get(engine, ()))
    for chain in chains:
        found = index.match(chain)
        assert found == expected_match(model, chain)
        matches = index.walk(chain)
        column = matches.by_slot()
        assert {e: int(column[index.slot(e)]) for e in ENGINES} == {e: found.get(e, 0) for e in ENGINES}
        assert matches.longest == max(found.values(), default=0)


@given(events, st.integers(1, 12))
@settings(max_examples=150)
def test_the_bound_holds_and_what_is_left_is_true(history, bound):
    index: KvIndex[str] = KvIndex(bound)
    model: dict[str, set[bytes]] = {}
    for event in history:
        getattr(index, event[0])(*event[1:])
        naive(model, event)
        assert index.pairs == sum(index.blocks(engine) for engine in ENGINES) <= bound
    for engine in ENGINES:
        held = {name for name in NAMES if engine in index.match([name])}
        assert held <= model.get(engine, set())
        assert len(held) == index.blocks(engine)


def test_at_the_bound_the_largest_gives_up_its_oldest():
    index: KvIndex[str] = KvIndex(4)
    index.replace("small", NAMES[:1])
    index.replace("large", NAMES[:3])
    index.stored("large", NAMES[:1])
    index.stored("large", NAMES[3:5])
    assert index.blocks("small") == 1
    assert index.complete("small")
    assert not index.complete("large")
    assert index.match([NAMES[0]]) == {"small": 1, "large": 1}
    assert index.match([NAMES[1]]) == index.match([NAMES[2]]) == {}


def test_a_slot_that_is_free_is_used_again():
    index: KvIndex[str] = KvIndex(10)
    for number in range(100):
        index.stored(f"e{number}", NAMES[:1])
        index.forget(f"e{number}")
    assert index.slot("e5") == -1
    index.stored("last", NAMES[:2])
    assert index.slot("last") == 0
    assert index.match(NAMES) == {"last": 2}


def test_many_engines_with_one_prefix_are_unpacked_at_once():
    index: KvIndex[int] = KvIndex(10_000)
    for engine in range(100):
        index.stored(engine, NAMES[: 1 + engine // 10])
    assert index.match(NAMES) == {engine: 1 + engine // 10 for engine in range(100)}


def test_names_are_read_no_further_than_the_first_miss():
    index: KvIndex[str] = KvIndex(10)
    index.stored("e", NAMES[:3])
    read = []
    assert index.match(read.append(name) or name for name in NAMES) == {"e": 3}
    assert len(read) == 4


def test_an_index_for_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        KvIndex(0)
