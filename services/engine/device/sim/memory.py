"""The card's memory: finite, counted by storage."""

from __future__ import annotations

from services.engine.device.sim.errors import out_of_memory


class Hbm:
    """Bytes in use of `limit` (gaudi-facts.md 4.3: mem_get_info is (Limit - InUse, Limit))."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_use = 0
        self.most_in_use = 0
        self.allocations = 0
        self.frees = 0
        self.largest = 0

    @property
    def free(self) -> int:
        """Bytes that are left."""
        return self.limit - self.in_use

    def take(self, size: int) -> Block:
        """Allocates. Raises SimError if it does not fit."""
        if size > self.limit - self.in_use:
            raise out_of_memory(size, self.free)
        self.in_use += size
        self.most_in_use = max(self.most_in_use, self.in_use)
        self.allocations += 1
        self.largest = max(self.largest, size)
        return Block(self, size)

    def reset_peak(self) -> None:
        """Forgets the most that was in use."""
        self.most_in_use = self.in_use


class Block:
    """A piece of the memory, free again once nobody holds it. Views of a storage share one."""

    __slots__ = ("_hbm", "size")

    def __init__(self, hbm: Hbm, size: int) -> None:
        self._hbm = hbm
        self.size = size

    def __del__(self) -> None:
        self._hbm.in_use -= self.size
        self._hbm.frees += 1
