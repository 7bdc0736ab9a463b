"""The scripted engine's KV memory: the real pool of blocks with its prefix cache, with nothing in them."""

from __future__ import annotations

from catenary_testing.engine.script import ScriptedCapacity
from catenary_testing.engine.sequence import ScriptedSequence
from services.engine.core import KvNews
from services.engine.kv import BlockPool


class ScriptedBlocks:
    """Blocks of sequences. A sequence of n tokens holds ceil(n / block_size)."""

    def __init__(self, capacity: ScriptedCapacity) -> None:
        self._pool = BlockPool(
            capacity.total_blocks, capacity.block_size, prefix_caching=capacity.prefix_caching
        )
        self._size = capacity.block_size
        self.news = KvNews(self._pool.events)

    @property
    def used(self) -> int:
        """Blocks in use."""
        return self._pool.used

    def start(self, sequence: ScriptedSequence) -> bool:
        """Give a waiting sequence what is cached of its prompt, if there is room for the rest of it too.

        Its last token is always computed.
        """
        pool, length = self._pool, len(sequence.token_ids)
        missing = pool.blocks_for(length)
        hits: list[int] = []
        if pool.prefix_caching and sequence.takes_hits:
            hittable = (length - 1) // pool.block_size
            hits = pool.lookup(sequence.block_names(hittable, pool.block_size))
        if missing - len(hits) > pool.free_count - pool.idle(hits):
            return False
        pool.acquire(hits)
        sequence.block_table = hits
        sequence.computed = len(hits) * pool.block_size
        if not sequence.started:
            sequence.cached_tokens = min(sequence.computed, sequence.spec.prompt_len)
        return True

    def missing(self, sequence: ScriptedSequence) -> int:
        """Blocks that it needs beside those it has."""
        return -(-len(sequence.token_ids) // self._size) - len(sequence.block_table)

    def grow(self, sequence: ScriptedSequence, count: int) -> bool:
        """Give a sequence so many more blocks; False if not as many are free."""
        if count > self._pool.free_count:
            return False
        sequence.block_table += self._pool.allocate(count)
        return True

    def computed(self, sequence: ScriptedSequence, count: int) -> None:
        """Note that the next `count` tokens of a sequence are computed: others can hit what they fill."""
        size, before = self._size, sequence.computed
        sequence.computed = before + count
        if not self._pool.prefix_caching or sequence.spec.pooling is not None:
            return
        first, last = before // size, (before + count) // size
        if first == last:
            return
        names = sequence.block_names(last, size)
        for index in range(first, last):
            self._pool.publish(sequence.block_table[index], names[index])

    def release(self, sequence: ScriptedSequence, *, failed: bool = False) -> None:
        """Take a sequence's blocks. What one that `failed` computed is not to be trusted."""
        if failed:
            self._pool.forget(sequence.block_table)
        self._pool.free(sequence.block_table)
        sequence.block_table = []
        sequence.computed = 0
