"""Virtual time of compilations. Facts 2.4 and 7: 20 to 45 s for a bucket of a large model."""

from __future__ import annotations

from typing import Final

# Seconds for each operation of a recipe. A decoder of 32 layers has about 1,500.
SECONDS_PER_OPERATION: Final = 0.01
# Loading a cached recipe (facts 2.4: 504 to 34 s, 66 to 23 s).
CACHED_SHARE: Final = 0.1


def compile_seconds(operations: int, *, recipe_s: float, cached: bool) -> float:
    """Virtual seconds for a recipe of so many operations."""
    seconds = recipe_s + operations * SECONDS_PER_OPERATION
    return seconds * CACHED_SHARE if cached else seconds
