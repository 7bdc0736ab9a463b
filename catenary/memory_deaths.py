"""Whether a child process ended because memory ran out, for the message about its end."""

from __future__ import annotations

import resource
import signal
from pathlib import Path

from catenary.cgroups import count_oom_kills, memory_limits

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
