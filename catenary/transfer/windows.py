"""How much of one transfer is on its way at once."""

from __future__ import annotations

from typing import Final

# What a fast device and a fast network move while an engine that is busy makes one step.
_WINDOW_BYTES: Final = 64 << 20
_MOST_CHUNKS: Final = 16


def window_of(chunk_bytes: int) -> int:
    """Chunks of this size that a transfer keeps on their way: an engine looks at them once a step."""
    return max(2, min(_MOST_CHUNKS, _WINDOW_BYTES // chunk_bytes))
