"""An engine's core in a thread of this process, spoken to as if it were a process of its own."""

from __future__ import annotations

import gc
import os
import socket

from catenary.loop_thread import daemon_thread
from services.engine.core import serve
from services.engine.link import BlockingLink
from services.engine.servicer import ProcessCore


class CoreThread:
    """A thread that serves one core; has what a servicer wants of a process (`CoreLife`).

    A thread cannot be killed: its link is cut, and it ends after the step that it is in.
    """

    def __init__(self, fd: int) -> None:
        """`fd`: the core's end of the link. It stays the caller's."""
        # Shared with the thread's link: to shut one down cuts the other.
        self._socket = socket.socket(fileno=os.dup(fd))
        self._link = BlockingLink(socket.socket(fileno=os.dup(fd)))
        self._status = 0
        self._thread = daemon_thread(self._run, name="catenary-core")

    def wait(self) -> int:
        """Wait for the thread's end; what a process would have exited with."""
        self._thread.join()
        return self._status

    def terminate(self) -> None:
        """Cut the link."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def kill(self) -> None:
        """Cut the link: there is nothing harder that a thread would hear."""
        self.terminate()

    def _run(self) -> None:
        try:
            self._status = serve(self._link, own_process=False)
        finally:
            self._link.close()
            self._socket.close()
            # Models and their modules refer to one another: only the collector gives their memory back.
            gc.collect()


def thread_core(config_json: bytes, *, stop_s: float) -> ProcessCore:
    """A core that runs in a thread from `start` to `stop`."""
    return ProcessCore(config_json, stop_s=stop_s, spawn=CoreThread)
