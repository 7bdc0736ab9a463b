"""The pool against a slow model of it that holds everything in plain lists."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from catenary.blockhash import BlockHashes
from services.engine.kv import BlockPool, Cleared, OutOfBlocks, Removed, Stored

TOTAL, SIZE, LOG = 10, 2, 24


class PoolMachine(RuleBasedStateMachine):
    """Sequences of few different tokens come and go; a follower keeps up with events and all names."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(TOTAL, SIZE, prefix_caching=True, event_capacity=LOG)
        self.tables: list[tuple[list[int], list[int], bytes]] = []  # tokens, table, salt
        # The model: what each cached block holds, and the idle ones, the oldest first.
        self.cached: dict[int, bytes] = {}
        self.idle: list[int] = []
        # The follower.
        self.known: set[bytes] = set()
        self.number = 0

    def in_use(self) -> set[int]:
        return {block for _, table, _ in self.tables for block in table}

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9),
        salt=st.sampled_from([b"", b"x"]),
        published=st.integers(0, 9),
    )
    def start(self, tokens: list[int], salt: bytes, published: int) -> None:
        """A sequence takes its hits and new blocks, and publishes up to `published` of its full ones."""
        hashes = BlockHashes(SIZE, salt).extend(tokens)
        by_hash = {block_hash: block for block, block_hash in self.cached.items()}
        expected: list[int] = []
        for block_hash in hashes:
            if block_hash not in by_hash:
                break
            expected.append(by_hash[block_hash])
        hit = self.pool.lookup(hashes)
        assert hit == expected
        woken = [block for block in hit if block in self.idle]
        assert self.pool.idle(hit) == len(woken)
        self.pool.acquire(hit)
        self.idle = [block for block in self.idle if block not in woken]
        self.tables.append((tokens, hit, salt))
        count = self.pool.blocks_for(len(tokens)) - len(hit)
        empty = [b for b in range(TOTAL) if b not in self.in_use() and b not in self.idle]
        if count > len(empty) + len(self.idle):
            self.stop_at_once(hit, count)
            return
        new = self.pool.allocate(count)
        assert new == (empty + self.idle)[:count]
        evicted = self.idle[: max(0, count - len(empty))]
        self.idle = self.idle[len(evicted) :]
        for block in evicted:
            del self.cached[block]
        table = hit + new
        self.tables[-1] = (tokens, table, salt)
        for i, block_hash in enumerate(hashes[:published]):
            self.pool.publish(table[i], block_hash)
            if block_hash not in self.cached.values():
                self.cached[table[i]] = block_hash

    def stop_at_once(self, hit: list[int], count: int) -> None:
        before = self.pool.free_count
        with pytest.raises(OutOfBlocks) as caught:
            self.pool.allocate(count)
        assert (caught.value.requested, caught.value.free) == (count, before)
        self.tables.pop()
        self.release(hit)

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 99))
    def stop(self, which: int) -> None:
        _, table, _ = self.tables.pop(which % len(self.tables))
        self.release(table)

    def release(self, table: list[int]) -> None:
        self.pool.free(table)
        used = self.in_use()
        self.idle += [b for b in reversed(table) if b in self.cached and b not in used]

    @rule(ids=st.sets(st.integers(0, TOTAL - 1), max_size=3))
    def forget(self, ids: set[int]) -> None:
        self.pool.forget(ids)
        self.cached = {block: name for block, name in self.cached.items() if block not in ids}
        self.idle = [block for block in self.idle if block not in ids]

    @rule()
    def clear(self) -> None:
        assert self.pool.clear_cache() == len(self.cached)
        self.cached, self.idle = {}, []

    @rule()
    def follow(self) -> None:
        for event in self.pool.events.drain():
            if event.sequence_number != self.number + 1:
                self.take_names()
                return
            self.number = event.sequence_number
            match event:
                case Stored():
                    assert event.block_hash not in self.known
                    self.known.add(event.block_hash)
                case Removed():
                    self.known.remove(event.block_hash)
                case Cleared():
                    self.known = set()
        assert self.known == set(self.pool.events.names())
        assert self.number == self.pool.events.number

    def take_names(self) -> None:
        self.known = set(self.pool.events.names())
        self.number = self.pool.events.number

    @rule()
    def names(self) -> None:
        assert sorted(self.pool.events.names()) == sorted(self.cached.values())

    @invariant()
    def books_add_up(self) -> None:
        self.pool.check([table for _, table, _ in self.tables])
        used = self.in_use()
        assert (self.pool.used, self.pool.free_count) == (len(used), TOTAL - len(used))
        assert self.pool.cached_count == len(self.cached)
        assert self.pool.highest_used == max(used, default=-1)


TestPoolModel = PoolMachine.TestCase
TestPoolModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
