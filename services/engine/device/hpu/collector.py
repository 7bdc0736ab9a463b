"""Python's garbage collector beside the vendor's objects. Source: docs/gaudi-facts.md 2.4."""

from __future__ import annotations

import gc
from typing import Final

_ORIGINAL: Final = gc.get_threshold()


def relax_collector(multiplier: int) -> None:
    """Multiplies Python's own collection thresholds: walking the vendor's many objects makes pauses long."""
    gc.set_threshold(*(threshold * multiplier for threshold in _ORIGINAL))
