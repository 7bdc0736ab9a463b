"""What is said when something does not fit."""

from __future__ import annotations

GIB = 2**30


class InsufficientMemory(Exception):
    """The model or the KV pool does not fit the device. One line with the numbers and what to change."""
