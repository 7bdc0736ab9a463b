"""The threads that compute a CPU's native forwards together, and how long the system lets each run.

Threads that compute a forward together synchronize every few tens of microseconds. A thread that wakes up
late found another process on its core, as a rule a service that the step before has woken, and waited until
that one slept or its slice was over; meanwhile all the other threads waited too. Linux lets a thread with a
shorter slice take the core as soon as it wakes up. Its share of the core stays: it is preempted as often.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Sequence
from ctypes import c_int32, c_void_p

from catenary.telemetry import get_logger
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


log = get_logger(__name__)

# Of sched_setattr. The C library knows it by name since glibc 2.41.
_NUMBERS = {"x86_64": 314, "AMD64": 314, "aarch64": 274, "riscv64": 274}


class _Attributes(ctypes.Structure):
    """`sched_attr`, as it was first; runtime, of ordinary threads, is the slice in nanoseconds."""

    _fields_ = [
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    ]


def ask_for_slices(microseconds: int) -> bool:
    """Ask for slices of this length for the calling thread and those that it will start; whether that was
    understood.

    It does nothing for a thread of another policy than the ordinary ones, and Linux before 6.12 takes no
    notice of it. No right is needed.
    """
    number = _NUMBERS.get(platform.machine())
    if number is None or not hasattr(os, "sched_getscheduler"):
        return False
    try:
        policy = os.sched_getscheduler(0)
        nice = os.getpriority(os.PRIO_PROCESS, 0)
    except OSError as error:
        # A sandbox's business, as is the call below: nothing depends on it.
        log.debug("the system does not tell how a thread is scheduled", error=error.strerror)
        return False
    if policy not in (os.SCHED_OTHER, os.SCHED_BATCH):
        return False
    asked = _Attributes(ctypes.sizeof(_Attributes), policy, nice=nice, runtime=microseconds * 1000)
    library = ctypes.CDLL(None, use_errno=True)
    if library.syscall(number, 0, ctypes.byref(asked), 0):
        # Some sandboxes allow no such call.
        log.debug("the system gives no slices of a length", error=os.strerror(ctypes.get_errno()))
        return False
    return True
