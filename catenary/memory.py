"""A process's memory: give back what is free, bound a block of work, explain a death by lack of it."""

from __future__ import annotations

import asyncio
import ctypes
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from catenary.cgroups import count_oom_kills, memory_limits

CHECK_S = 5.0
LONGEST_WAIT_S = 60.0
SLACK_BYTES = 64 << 20

# jemalloc's command for all arenas: their number is its MALLCTL_ARENAS_ALL.
_PURGE_ALL = b"arena.4096.purge"
_STATM = Path("/proc/self/statm")


async def give_memory_back(
    trim: Callable[[], object] | None = None,
    resident: Callable[[], int] | None = None,
    *,
    check_s: float = CHECK_S,
    longest_wait_s: float = LONGEST_WAIT_S,
) -> None:
    """Look for ever, every `check_s` seconds, whether the process has grown, and trim the heap if it has.

    glibc gives freed memory back only from the top of a heap, so that after a flood of large messages a
    process keeps most of its peak. A trim takes milliseconds, in a thread; one that finds little is tried
    again later and later. Returns at once where there is no such allocator or no /proc.

    Args:
        trim: gives back what is free; by default what the allocator has for that.
        resident: resident bytes of this process; by default by /proc.
    """
    trim = trim or find_trim()
    resident = resident or resident_bytes
    try:
        floor = resident()
    except OSError:
        return
    if trim is None:
        return
    wait_s = check_s
    while True:
        await asyncio.sleep(wait_s)
        before = resident()
        if before <= floor + SLACK_BYTES:
            floor, wait_s = min(floor, before), check_s
            continue
        await asyncio.to_thread(trim)
        after = resident()
        floor = min(floor, after)
        wait_s = check_s if before - after > SLACK_BYTES // 4 else min(2 * wait_s, longest_wait_s)


def find_trim() -> Callable[[], object] | None:
    """Return a function that gives back free memory of this process's allocator (tcmalloc, jemalloc, glibc),
    or None."""
    try:
        process = ctypes.CDLL(None)
    except OSError:
        return None
    if hasattr(process, "MallocExtension_ReleaseFreeMemory"):
        release = process.MallocExtension_ReleaseFreeMemory
        release.argtypes, release.restype = (), None
        return lambda: release()
    if hasattr(process, "mallctl"):
        control = process.mallctl
        control.argtypes = (ctypes.c_char_p, *(ctypes.c_void_p,) * 3, ctypes.c_size_t)
        return lambda: control(_PURGE_ALL, None, None, None, 0)
    if hasattr(process, "malloc_trim"):
        trim = process.malloc_trim
        trim.argtypes = (ctypes.c_size_t,)
        return lambda: trim(0)
    return None


def resident_bytes() -> int:
    """Return the resident size of this process. Raises OSError where there is no /proc."""
    return int(_STATM.read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


_MIB = 1 << 20
# Signals that end a process whose address space is used up: some allocators abort, and programs that do not
# check for a null pointer fault.
_OUT_OF_SPACE = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGTRAP, signal.SIGILL)


class MemoryWatch:
    """Counts kills of the kernel's out-of-memory killer from before a child is started."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._kills = count_oom_kills(root)

    def explain(self, status: int) -> str:
        """Return how memory explains this exit status (negative: the signal); "" where it does not.

        The text continues a sentence: ": the memory limit ...". Counting begins anew with each call.
        """
        if status == -signal.SIGKILL:
            return self._explain_kill()
        if status == 0 or (status < 0 and -status not in _OUT_OF_SPACE):
            return ""
        space, _ = resource.getrlimit(resource.RLIMIT_AS)
        if space == resource.RLIM_INFINITY:
            return ""
        return f": perhaps its address space ran out, which is limited to {space // _MIB} MiB (ulimit -v)"

    def _explain_kill(self) -> str:
        before, self._kills = self._kills, count_oom_kills(self._root)
        if before is not None and self._kills is not None and self._kills <= before:
            return ""
        limits = memory_limits(self._root)
        least = min(limits, key=lambda limit: limit.left, default=None)
        if least is not None and (self._kills is not None or least.left < least.limit // 4):
            return f": probably the memory limit of {least.limit // _MIB} MiB was reached ({least.file})"
        return ": probably the machine's memory ran out" if self._kills is not None else ""


@contextmanager
def bounded_memory(more: int) -> Iterator[None]:
    """Run the block with `more` bytes of address space than are in use, or less if the process is bounded so.

    Beyond that Python raises MemoryError; libraries may abort the process.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    ceiling = pages * resource.getpagesize() + more
    bound = ceiling if soft == resource.RLIM_INFINITY else min(ceiling, soft)
    resource.setrlimit(resource.RLIMIT_AS, (bound, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
