"""Whether a child process ended for want of memory, for the message about its end."""

from __future__ import annotations

import resource
import signal
from pathlib import Path

from catenary.cgroups import count_oom_kills, memory_limits

_MIB = 1 << 20
# What a process without address space ends with: allocators abort, others do not look at what they got.
_FOR_WANT_OF_SPACE = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGTRAP, signal.SIGILL)


class MemoryWatch:
    """Remembers, from before a child is started, how often the kernel has killed for memory."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._kills = count_oom_kills(root)

    def explain(self, status: int) -> str:
        """Return what memory has to do with this exit status (negative: the signal); "" for nothing.

        The text continues a sentence: ": the memory limit ...". After it the next child may be watched.
        """
        if status == -signal.SIGKILL:
            return self._explain_kill()
        if status == 0 or (status < 0 and -status not in _FOR_WANT_OF_SPACE):
            return ""
        space, _ = resource.getrlimit(resource.RLIMIT_AS)
        if space == resource.RLIM_INFINITY:
            return ""
        return f": perhaps for want of address space, which is limited to {space // _MIB} MiB (ulimit -v)"

    def _explain_kill(self) -> str:
        before, self._kills = self._kills, count_oom_kills(self._root)
        if before is not None and self._kills is not None and self._kills <= before:
            return ""
        limits = memory_limits(self._root)
        least = min(limits, key=lambda limit: limit.left, default=None)
        if least is not None and (self._kills is not None or least.left < least.limit // 4):
            return f": the memory limit of {least.limit // _MIB} MiB was probably reached ({least.file})"
        return ": the machine's memory was probably used up" if self._kills is not None else ""
