"""From the core to a router, link by link: whatever is merged or lost, both know the same in the end."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from services.engine.core.outputs import KvEventDelta, net_changes
from services.engine.kv import BlockPool
from services.engine.link import KvChanges, KvContents
from services.engine.servicer import Core, PrefixCacheMirror
from services.engine.servicer.prefix_cache import PrefixCacheDelta
from tests.support.kv_follower import KvFollower, names_of


def name(number: int) -> bytes:
    return hashlib.blake2b(bytes([number]), digest_size=16).digest()


class FollowedCore(Core):
    """A core that notes whether it is followed."""

    followed = 0

    def follow_kv(self) -> None:
        self.followed += 1


FollowedCore.__abstractmethods__ = frozenset()
make_core: Any = FollowedCore


class Cache:
    """A pool whose every block is published as soon as it is taken."""

    def __init__(self, blocks: int, event_capacity: int) -> None:
        self.pool = BlockPool(blocks, 1, prefix_caching=True, event_capacity=event_capacity)
        self.news = KvEventDelta(self.pool.events)

    def use(self, number: int) -> None:
        if self.pool.lookup([name(number)]):
            return
        (block,) = self.pool.allocate(1)
        self.pool.publish(block, name(number))
        self.pool.free([block])

    @property
    def names(self) -> set[bytes]:
        return set(self.pool.events.names())


def told(news: Iterable[KvContents | KvChanges]) -> list[KvContents | KvChanges]:
    return list(news)


def test_nothing_is_told_before_somebody_follows_and_then_all_of_it() -> None:
    cache = Cache(4, 100)
    cache.use(1)
    assert told(cache.news.due()) == []
    cache.news.follow()
    assert told(cache.news.due()) == [KvContents(name(1), True, True)]
    assert told(cache.news.due()) == []
    cache.use(2)
    cache.use(3)
    assert told(cache.news.due()) == [KvChanges(False, b"", name(2) + name(3))]


def test_an_empty_cache_is_told_too() -> None:
    cache = Cache(4, 100)
    cache.news.follow()
    assert told(cache.news.due()) == [KvContents(b"", True, True)]


def test_what_came_and_went_between_two_messages_is_not_named() -> None:
    cache = Cache(1, 100)
    cache.news.follow()
    told(cache.news.due())
    cache.use(1)
    cache.use(2)
    assert told(cache.news.due()) == [KvChanges(False, b"", name(2))]
    cache.use(3)
    cache.use(2)
    assert told(cache.news.due()) == []
    cache.use(1)
    cache.pool.clear_cache()
    cache.use(4)
    assert told(cache.news.due()) == [KvChanges(True, b"", name(4))]
    assert net_changes([]) is None


def test_more_events_than_the_log_holds_are_told_as_contents() -> None:
    cache = Cache(8, 3)
    cache.news.follow()
    told(cache.news.due())
    for number in range(4):
        cache.use(number)
    (contents,) = told(cache.news.due())
    assert isinstance(contents, KvContents)
    assert set(names_of(contents.names)) == cache.names
    cache.use(4)
    assert told(cache.news.due()) == [KvChanges(False, b"", name(4))]


def test_contents_come_in_parts() -> None:
    pool = BlockPool(70_000, 1, prefix_caching=True)
    for block in pool.allocate(70_000):
        pool.publish(block, block.to_bytes(16, "big"))
    news = KvEventDelta(pool.events)
    news.follow()
    parts = [part for part in news.due() if isinstance(part, KvContents)]
    assert [(len(part.names) // 16, part.first, part.last) for part in parts] == [
        (65_536, True, False),
        (4_464, False, True),
    ]
    mirror = PrefixCacheMirror()
    for part in parts[:1]:
        mirror.take(part)
    assert mirror.names() is None
    mirror.take(parts[1])
    assert len(mirror.names() or ()) == 70_000


def test_the_core_is_asked_when_the_first_router_follows_and_once_a_life() -> None:
    mirror, core = PrefixCacheMirror(), make_core()
    mirror.core_ready(core, publishes=True)
    assert core.followed == 0
    first = mirror.join(max_pending=10)
    mirror.join(max_pending=10)
    mirror.leave(first)
    mirror.join(max_pending=10)
    assert core.followed == 1
    mirror.core_lost()
    other = make_core()
    mirror.core_ready(other, publishes=True)
    assert (core.followed, other.followed) == (1, 1)
    mirror.core_lost()
    mirror.core_ready(without := make_core(), publishes=False)
    assert without.followed == 0


def test_a_dead_core_clears_what_routers_know_and_the_next_one_tells_anew() -> None:
    mirror = PrefixCacheMirror()
    mirror.core_ready(make_core(), publishes=True)
    delta, router = mirror.join(max_pending=10), KvFollower()
    assert delta.take() == []
    mirror.take(KvContents(name(1) + name(2), True, True))
    deliver(delta, router)
    assert router.names == {name(1), name(2)}
    mirror.core_lost()
    deliver(delta, router)
    assert (router.names, router.number, mirror.names()) == (set(), 1, None)
    mirror.core_ready(make_core(), publishes=True)
    # Late news of the first life.
    mirror.take(KvChanges(False, b"", name(3)))
    assert delta.take() == []
    mirror.take(KvContents(b"", True, True))
    mirror.take(KvChanges(False, b"", name(4)))
    deliver(delta, router)
    assert router.names == {name(4)}
    assert router.snapshots == 2


def deliver(delta: PrefixCacheDelta, router: KvFollower) -> None:
    for message in delta.take():
        router.take(message)


moves = st.one_of(
    st.tuples(st.just("use"), st.integers(0, 40)),
    st.tuples(st.sampled_from(["clear", "step", "resync"]), st.just(0)),
    st.tuples(st.just("deliver"), st.integers(0, 1)),
)


@given(st.lists(moves, max_size=120), st.integers(1, 12), st.integers(1, 6), st.integers(1, 9))
def test_whatever_is_merged_or_dropped_all_know_the_same_in_the_end(
    todo: list[tuple[str, int]], blocks: int, events: int, pending: int
) -> None:
    cache, mirror = Cache(blocks, events), PrefixCacheMirror()
    mirror.core_ready(make_core(), publishes=True)
    links = [(mirror.join(max_pending=pending), KvFollower()) for _ in range(2)]
    cache.news.follow()

    def step() -> None:
        for news in cache.news.due():
            mirror.take(news)

    for what, number in todo:
        match what:
            case "use":
                cache.use(number)
            case "clear":
                cache.pool.clear_cache()
            case "step":
                step()
            case "resync":
                links[0][0].renew()
            case "deliver":
                deliver(*links[number])
    step()
    for delta, router in links:
        deliver(delta, router)
        assert router.names == cache.names == set(mirror.names() or ())
        assert len(delta.take()) == 0
