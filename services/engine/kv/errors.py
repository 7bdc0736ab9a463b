"""What can go wrong with blocks."""

from __future__ import annotations


class OutOfBlocks(Exception):
    """More blocks were asked for than are free. Nothing was allocated."""

    def __init__(self, requested: int, free: int) -> None:
        super().__init__(f"{requested} KV blocks were asked for and {free} are free")
        self.requested = requested
        self.free = free


class BlockError(Exception):
    """A defect: blocks were freed wrongly, or the books of the pool and its users differ."""
