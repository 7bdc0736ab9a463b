"""The known name that an unknown one was probably meant to be: "did you mean"."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

LONGEST_COMPARED = 128
"""Most characters of a name that is compared: the time goes with their square, and clients of the HTTP API
choose the name."""
_LIKENESS = 0.6


def nearest(name: str, known: Iterable[str], *, likeness: float = _LIKENESS) -> str | None:
    """Return the one of `known` most like `name`, whatever the case of letters; None if none is like it.

    Args:
        name: the unknown name. One above LONGEST_COMPARED characters is like none.
        known: the names to choose from.
        likeness: the least share of characters in common, 0 to 1.
    """
    if not name or len(name) > LONGEST_COMPARED:
        return None
    # The first of two names that differ in case alone stays: sorted, so that the answer is always the same.
    folded: dict[str, str] = {}
    for each in sorted(known):
        folded.setdefault(each.casefold(), each)
    close = difflib.get_close_matches(name.casefold(), folded, n=1, cutoff=likeness)
    return folded[close[0]] if close else None


def near(name: str, known: Iterable[str], *, likeness: float = _LIKENESS, quoted: bool = True) -> str:
    """Return the end of a message about an unknown name, ` (did you mean 'x'?)`; empty if no known name is
    near."""
    close = nearest(name, known, likeness=likeness)
    if close is None:
        return ""
    return f" (did you mean {close!r}?)" if quoted else f" (did you mean {close}?)"
