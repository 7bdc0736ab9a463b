"""What the card counts: behind the bridge's metrics (docs/gaudi-facts.md 4.4)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    """Since the card was reset. Seconds are virtual.

    fallback_ops: times by operation. recipe_hits, recipe_misses: of the recipe cache on disk.
    host_reads: results that went to the host. waits: those of them for which the host stood still until the
    device had caught up: all but copies that do not wait. blocking_uploads: copies from the host that it
    waited for. open_uploads: copies from the host into a recipe of lazy mode that was not flushed before,
    which is then another recipe than without what came before.
    """

    compilations: int = 0
    compile_seconds: float = 0.0
    fallbacks: int = 0
    fallback_ops: Counter[str] = field(default_factory=Counter)
    recipe_hits: int = 0
    recipe_misses: int = 0
    mark_steps: int = 0
    host_reads: int = 0
    waits: int = 0
    blocking_uploads: int = 0
    open_uploads: int = 0
    operations: int = 0
    captures: int = 0
    replays: int = 0
    backend_compilations: int = 0
