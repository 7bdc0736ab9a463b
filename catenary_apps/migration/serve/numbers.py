"""Numbers as vLLM's command line writes them."""

from __future__ import annotations

import re

_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "K": 2**10,
    "M": 2**20,
    "G": 2**30,
    "T": 2**40,
    "t": 10**12,
}
_NUMBER = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)([kKmMgGtT]?)")


def count(text: str) -> int:
    """A whole number, or one with a unit: 16k is 16,000 and 16K is 16,384. Raises ValueError."""
    match = _NUMBER.fullmatch(text)
    if match is None or ("." in match[1] and not match[2]):
        raise ValueError("must be a whole number, or one with a unit as in 16k or 16K")
    if "." not in match[1]:
        return int(match[1]) * _UNITS[match[2]]
    return int(float(match[1]) * _UNITS[match[2]])
