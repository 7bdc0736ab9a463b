"""The KV index against a naive one, and its bound."""

from __future__ import annotations

from itertools import takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.index import KvIndex
from tests.support.kv_matched import matched

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
        assert matched(index, chain) == expected_match(model, chain)


@given(st.dictionaries(engines, st.integers(0, 24)), st.integers(1, 24))
def test_in_pieces_it_finds_the_same_of_chains_without_gaps(held, part):
    index: KvIndex[str] = KvIndex(10_000)
    for engine, blocks in held.items():
        index.stored(engine, NAMES[:blocks])
    assert matched(index, NAMES, part) == {engine: blocks for engine, blocks in held.items() if blocks}


@given(st.dictionaries(engines, st.sets(st.sampled_from(NAMES))), st.integers(1, 24))
def test_a_gap_can_hide_in_a_piece_alone_of_which_the_last_block_is_held(held, part):
    index: KvIndex[str] = KvIndex(10_000)
    for engine, names in held.items():
        index.stored(engine, names)
    exact, found = expected_match(held, NAMES), matched(index, NAMES, part)
    assert found.keys() == exact.keys()
    for engine, blocks in found.items():
        whole = exact[engine] // part * part
        assert blocks >= exact[engine]
        ends = range(whole + part - 1, blocks - blocks % part, part)
        assert all(NAMES[end] in held[engine] for end in ends)
        assert blocks == exact[engine] or NAMES[min(whole + part, 24) - 1] in held[engine]


def test_a_long_chain_takes_few_looks():
    index: KvIndex[str] = KvIndex(10_000)
    chain = [number.to_bytes(16, "little") for number in range(1000)]
    index.stored("all", chain)
    index.stored("half", chain[:500])
    assert matched(index, map(_Counted, chain), part=16) == {"all": 1000, "half": 500}
    assert 0 < _Counted.looks < 100


class _Counted(bytes):
    """A block's name that counts the looks for it."""

    looks = 0

    def __hash__(self) -> int:
        _Counted.looks += 1
        return super().__hash__()


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
        held = {name for name in NAMES if engine in matched(index, [name])}
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
    assert matched(index, [NAMES[0]]) == {"small": 1, "large": 1}
    assert matched(index, [NAMES[1]]) == matched(index, [NAMES[2]]) == {}


def test_a_slot_that_is_free_is_used_again():
    index: KvIndex[str] = KvIndex(10)
    for number in range(100):
        index.stored(f"e{number}", NAMES[:1])
        index.forget(f"e{number}")
    assert index.slot("e5") == -1
    index.stored("last", NAMES[:2])
    assert index.slot("last") == 0
    assert matched(index, NAMES) == {"last": 2}


def test_many_engines_with_one_prefix_are_unpacked_at_once():
    index: KvIndex[int] = KvIndex(10_000)
    for engine in range(100):
        index.stored(engine, NAMES[: 1 + engine // 10])
    assert matched(index, NAMES) == {engine: 1 + engine // 10 for engine in range(100)}


def test_pieces_are_read_no_further_than_the_first_miss():
    index: KvIndex[str] = KvIndex(10)
    index.stored("e", NAMES[:3])
    parts = iter([NAMES[:2], NAMES[2:4], NAMES[4:6]])
    assert index.walk(parts).by_slot()[index.slot("e")] == 3
    assert next(parts) == NAMES[4:6]


def test_an_index_for_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        KvIndex(0)
