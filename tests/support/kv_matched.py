"""What a KV index knows of a chain of blocks, as a test wants to compare it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from services.router.index import KvIndex

K = TypeVar("K")


def matched(index: KvIndex[K], names: Iterable[bytes], part: int = 1) -> dict[K, int]:
    """Engines that hold the first of `names`, and how many from there on; looked up `part` at once."""
    chain = list(names)
    parts = (chain[start : start + part] for start in range(0, len(chain), part))
    column = index.walk(parts).by_slot()
    found = {engine: int(column[index.slot(engine)]) for engine in index.engines}
    return {engine: blocks for engine, blocks in found.items() if blocks}
