"""The kernels' library, loaded by ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.engine.device.cpu.native.building import (
    COMPILE_S,
    BuildError,
    Level,
    best_level,
    build,
    kernel_directory,
)

# What ctypes calls a type of an argument or a result; None is void.
CType = Any


class Library:
    """One loaded library. Its functions release the interpreter's lock while they run."""

    def __init__(self, level: Level, path: Path) -> None:
        """Raise BuildError if the file cannot be loaded."""
        self.level = level
        self.path = path
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            raise BuildError(f"{path} cannot be loaded: {error}") from error

    def function(self, name: str, result: CType, *arguments: CType) -> Callable[..., Any]:
        """The function `name` of the library's C interface, with the types that it takes and gives.

        Raises BuildError if there is none: another compiler may have left it out.
        """
        try:
            function = self._library[name]
        except AttributeError:
            raise BuildError(f"{self.path} has no {name}") from None
        function.restype, function.argtypes = result, arguments
        return function


def open_library(
    level: Level | None = None,
    *,
    cache: Path | None = None,
    progress: Callable[[str], None] = lambda _: None,
    limit_s: float = COMPILE_S,
) -> Library:
    """The kernels of `level` (None: the best that this CPU has), built if need be. Raises BuildError.

    `progress` is told what goes on while they are built; the compiler may take `limit_s` seconds for a file.
    """
    chosen = level or best_level()
    return Library(chosen, build(chosen, kernel_directory(cache), progress, limit_s))
