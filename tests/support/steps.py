"""How much work something does, in a number that is the same on every machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")


def counted(work: Callable[[], T]) -> tuple[T, int]:
    """What `work` returns, and the number of calls that it makes in this thread: of functions, generators'
    turns and built-in methods, such as `str.find`. Work within one built-in call counts as one."""
    calls = 0

    def count(_frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal calls
        if event in ("call", "c_call"):
            calls += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        return work(), calls
    finally:
        sys.setprofile(before)
