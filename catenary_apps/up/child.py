"""Becomes another program that dies with its parent: `python child.py PARENT_PID CPUS PROGRAM ARGUMENT...`.

CPUS: numbers with commas, those that it keeps to; empty: it stays where it is.

Run by path, without site packages, so that it costs a few milliseconds. The kernel's parent-death signal
survives exec, so a supervisor that is killed with SIGKILL still leaves nothing behind; what a service has
spawned itself ends at the end of file on its link.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1


def wrapped(command: tuple[str, ...], cpus: Sequence[int] = ()) -> tuple[str, ...]:
    """Return the command line that runs `command` as a child that does not outlive this process.

    It keeps to `cpus`, if there are any.
    """
    return (sys.executable, "-I", "-S", __file__, str(os.getpid()), ",".join(map(str, cpus)), *command)


def main() -> None:
    parent, cpus, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    if cpus:
        # They may have been taken away since; it then runs where it can.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(",")})
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The parent may have died before the request above was in force.
    if os.getppid() != parent:
        sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
