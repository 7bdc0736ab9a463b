"""Levels of the CPU's native kernels for tests: the one that is served here, and in long tests the others."""

from __future__ import annotations

import pytest

from services.engine.device.cpu.native import Level, Library, levels_here, open_library

# The best level is built by `make setup`. To build each of the others takes as long as all other tests of it.
LEVELS_HERE = [
    pytest.param(level, id=level.name, marks=() if level is levels_here()[0] else pytest.mark.long)
    for level in levels_here()
]


def library_of(level: Level) -> Library:
    return open_library(level)
