"""The threads that compute a CPU's native forwards together."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int32, c_void_p

from services.engine.device.cpu.native import Library


class Team:
    """`size` threads, of which the caller's is one; they sleep between forwards.

    cpus: where the others run, in turn; none: where the system puts them. handle: for the library.
    """

    def __init__(self, library: Library, size: int, cpus: Sequence[int] = ()) -> None:
        make = library.function("catenary_team_new", c_void_p, c_int32, c_void_p, c_int32)
        self._free = library.function("catenary_team_free", None, c_void_p)
        self.size = size
        self.handle = make(size, (c_int32 * len(cpus))(*cpus), len(cpus))
        if not self.handle:
            raise MemoryError(f"no {size} threads for native forwards")

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self._free(self.handle)
