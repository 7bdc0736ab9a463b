"""What the fused kernels of the simulator share."""

from __future__ import annotations

from collections.abc import Sequence

Window = Sequence[int]
"""(left, right): how far a query looks to either side, -1 for any distance."""

NOISE = -3.0
"""Stands where a kernel writes nothing useful: finite, as seen on cards, and wrong enough to be noticed."""


def require(condition: bool, message: str) -> None:
    """Raises RuntimeError, which is how the bridge refuses arguments."""
    if not condition:
        raise RuntimeError(message)
