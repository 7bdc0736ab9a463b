"""KV events with numbers, gaps and snapshots, against what the engine really holds."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from catenary.v1 import engine_pb2
from services.router.index import KvFeed, KvIndex, MalformedKv
from tests.support.kv_matched import matched

NAMES = [bytes([number]) * 16 for number in range(16)]


class Cache:
    """An engine's cache, and the messages that it would send."""

    def __init__(self) -> None:
        self.held: dict[bytes, None] = {}
        self.number = 0

    def snapshot(self, parts: int) -> list[engine_pb2.KvSnapshot]:
        names = list(self.held)
        size = -(-len(names) // parts) or 1
        chunks = [names[start : start + size] for start in range(0, len(names), size)] or [[]]
        return [
            engine_pb2.KvSnapshot(
                number=self.number, names=b"".join(chunk), first=i == 0, last=i == len(chunks) - 1
            )
            for i, chunk in enumerate(chunks)
        ]

    def change(self, kind: str, names: list[bytes]) -> engine_pb2.KvChanges:
        first = self.number + 1
        if kind == "cleared":
            self.held.clear()
            self.number += 1
            change = engine_pb2.KvChange(cleared=True)
        else:
            if kind == "stored":
                self.held.update(dict.fromkeys(names))
            else:
                for name in names:
                    self.held.pop(name, None)
            self.number += len(names)
            field: Any = {kind: engine_pb2.KvNames(names=b"".join(names))}
            change = engine_pb2.KvChange(**field)
        return engine_pb2.KvChanges(first_number=first, changes=[change])


def known(index: KvIndex[str]) -> set[bytes]:
    return {name for name in NAMES if matched(index, [name])}


steps = st.lists(
    st.tuples(
        st.sampled_from(["stored", "stored", "removed", "cleared"]),
        st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True),
        st.booleans(),
    ),
    max_size=40,
)


@given(steps, st.integers(1, 3))
@settings(max_examples=150)
def test_what_is_known_is_held_whatever_is_lost(history, parts):
    index: KvIndex[str] = KvIndex(1000)
    feed = KvFeed(index, "e")
    cache = Cache()
    cache.change("stored", NAMES[:2])
    for part in cache.snapshot(parts):
        assert not feed.snapshot(part)
    missed = False
    for kind, names, lost in history:
        changes = cache.change(kind, names)
        if lost:
            missed = True
            continue
        resync = feed.changes(changes)
        assert resync == missed
        if resync:
            assert known(index) == set()
            assert not index.complete("e")
            for part in cache.snapshot(parts):
                assert not feed.snapshot(part)
            missed = False
        assert known(index) == set(cache.held)
        assert index.complete("e")
        assert feed.last_number == cache.number
    feed.close()
    assert index.pairs == 0


def test_changes_that_the_snapshot_has_are_passed_over():
    index: KvIndex[str] = KvIndex(1000)
    feed = KvFeed(index, "e")
    cache = Cache()
    early = [cache.change("stored", NAMES[:3]), cache.change("removed", NAMES[:1])]
    late = cache.change("stored", NAMES[5:6])
    (whole,) = Cache.snapshot(cache, 1)
    whole = engine_pb2.KvSnapshot(number=4, names=NAMES[1] + NAMES[2], first=True, last=True)
    assert not feed.changes(early[0])
    assert known(index) == set()
    assert not feed.snapshot(whole)
    merged = engine_pb2.KvChanges(
        first_number=1, changes=[change for message in (*early, late) for change in message.changes]
    )
    assert not feed.changes(merged)
    assert known(index) == {NAMES[1], NAMES[2], NAMES[5]}
    assert feed.last_number == 5
    assert not feed.changes(engine_pb2.KvChanges(first_number=2, changes=early[1].changes))
    assert known(index) == {NAMES[1], NAMES[2], NAMES[5]}


def test_an_old_clear_counts_once():
    index: KvIndex[str] = KvIndex(1000)
    feed = KvFeed(index, "e")
    feed.snapshot(engine_pb2.KvSnapshot(number=2, names=NAMES[0], first=True, last=True))
    clear = engine_pb2.KvChange(cleared=True)
    assert not feed.changes(engine_pb2.KvChanges(first_number=2, changes=[clear]))
    assert known(index) == {NAMES[0]}
    assert not feed.changes(engine_pb2.KvChanges(first_number=2, changes=[clear, clear]))
    assert known(index) == set()
    assert feed.last_number == 3


def test_a_snapshot_in_pieces_that_do_not_fit_is_asked_for_again():
    index: KvIndex[str] = KvIndex(1000)
    feed = KvFeed(index, "e")
    assert not feed.snapshot(engine_pb2.KvSnapshot(number=7, names=NAMES[0]))
    assert known(index) == set()
    assert not feed.snapshot(engine_pb2.KvSnapshot(number=7, names=NAMES[0], first=True))
    assert not index.complete("e")
    assert feed.snapshot(engine_pb2.KvSnapshot(number=8, names=NAMES[1]))
    assert known(index) == set()
    assert not feed.snapshot(engine_pb2.KvSnapshot(number=8, names=NAMES[1], first=True))
    assert feed.changes(engine_pb2.KvChanges(first_number=9))
    assert not feed.changes(engine_pb2.KvChanges(first_number=9))


@pytest.mark.parametrize(
    "change",
    [
        engine_pb2.KvChange(),
        engine_pb2.KvChange(stored=engine_pb2.KvNames(names=b"short")),
        engine_pb2.KvChange(removed=engine_pb2.KvNames(names=bytes(16 * 65_537))),
    ],
)
def test_malformed_changes_are_told_as_such(change):
    feed = KvFeed(KvIndex(1000), "e")
    feed.snapshot(engine_pb2.KvSnapshot(first=True, last=True))
    with pytest.raises(MalformedKv):
        feed.changes(engine_pb2.KvChanges(first_number=1, changes=[change]))
