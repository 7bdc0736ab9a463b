"""Blocks of no live sequence: of prompts computed for another engine, and for KV that comes from one."""

from __future__ import annotations

from dataclasses import dataclass

from services.engine.kv import BlockPool


@dataclass(frozen=True, slots=True)
class Expected:
    """Blocks for KV that comes from elsewhere; the first `hits` of them hold theirs already."""

    blocks: list[int]
    hits: int


class KeptBlocks:
    """Block tables by key, the oldest first. There is one reference from here to each block of each table.

    All of them may be given up at any time, when sequences are short of blocks: whoever has kept some asks
    again before he counts on them.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._tables: dict[int, list[int]] = {}

    def __contains__(self, key: int) -> bool:
        return key in self._tables

    def keep(self, key: int, blocks: list[int]) -> None:
        """Takes over the caller's references to a table's blocks."""
        self._tables[key] = blocks

    def table(self, key: int) -> list[int] | None:
        """The blocks of a key that is kept."""
        return self._tables.get(key)

    def take(self, key: int) -> list[int] | None:
        """Gives the references to the caller; None if there are none (any more)."""
        return self._tables.pop(key, None)

    def release(self, key: int) -> bool:
        """Frees the blocks of a key, if it is kept."""
        blocks = self._tables.pop(key, None)
        if blocks is None:
            return False
        self._pool.free(blocks)
        return True

    def give_up(self) -> bool:
        """Frees the oldest, if there is one: blocks are short."""
        oldest = next(iter(self._tables), None)
        return oldest is not None and self.release(oldest)

    def tables(self) -> list[list[int]]:
        """All of them."""
        return list(self._tables.values())
