"""What the card counts: behind the bridge's metrics (facts/gaudi.md 4.4)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    """Since the card was reset. Seconds are virtual.

    fallback_ops: times by operation. recipe_hits, recipe_misses: of the recipe cache on disk.
    """

    compilations: int = 0
    compile_seconds: float = 0.0
    fallbacks: int = 0
    fallback_ops: Counter[str] = field(default_factory=Counter)
    recipe_hits: int = 0
    recipe_misses: int = 0
    mark_steps: int = 0
    host_reads: int = 0
    operations: int = 0
    captures: int = 0
    replays: int = 0
    backend_compilations: int = 0
