"""Virtual time of compilations. gaudi-facts.md 2.4 and 7.1: 20 to 40 s for a bucket of a large model."""

from __future__ import annotations

import math
from typing import Any, Final

import torch

# Seconds for each operation of a recipe, of which a decoder of 32 layers has about 1,500; and for each
# element of the tensors that they read: an 8B model's decode takes 23 s so, a prefill of 2,048 tokens 35 s.
SECONDS_PER_OPERATION: Final = 0.01
SECONDS_PER_ELEMENT: Final = 1e-9
# Loading a cached recipe (gaudi-facts.md 2.4: 504 to 34 s, 66 to 23 s).
CACHED_SHARE: Final = 0.1


def compile_seconds(operations: int, elements: int, *, recipe_s: float, cached: bool) -> float:
    """Virtual seconds for a recipe of so many operations that read so many elements."""
    seconds = recipe_s + operations * SECONDS_PER_OPERATION + elements * SECONDS_PER_ELEMENT
    return seconds * CACHED_SHARE if cached else seconds


def elements_of(recipe: Any) -> int:
    """The elements of all shapes in a recipe's key."""
    if isinstance(recipe, torch.Size):
        return math.prod(recipe)
    if isinstance(recipe, tuple):
        return sum(map(elements_of, recipe))
    return 0
