"""A service as a process of its own, that a test may kill, stop, wake and start again."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from catenary_apps.up.child import wrapped


def clean_environment() -> dict[str, str]:
    """The environment without the developer's own settings, but for the model cache."""
    return {k: v for k, v in os.environ.items() if not k.startswith("CATENARY_") or k == "CATENARY_CACHE"}


class ServiceProcess:
    """`python -m module flags...`, at most one process at a time. It dies with the test run.

    Its output is appended to `log`.
    """

    def __init__(
        self,
        name: str,
        module: str,
        flags: Sequence[str],
        log_dir: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.log = log_dir / f"{name}.log"
        self._command = wrapped((sys.executable, "-m", module, *flags))
        self._environment = {**clean_environment(), **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The process's id."""
        if self._process is None:
            raise AssertionError(f"{self.name} was not started")
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it runs; a stopped process does."""
        return self._process is not None and self._process.poll() is None

    @property
    def children(self) -> tuple[int, ...]:
        """Ids of the processes that it started."""
        return tuple(child.pid for child in psutil.Process(self.pid).children())

    def start(self) -> None:
        """Spawn it if it does not run."""
        if self.alive:
            return
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment
            )

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self._end(signal.SIGKILL, 10)

    def stop(self, timeout_s: float = 20) -> None:
        """SIGTERM, and SIGKILL if it does not end in time. Idempotent."""
        if not self.alive:
            return
        # A stopped process hears SIGTERM only once it goes on.
        self.send(signal.SIGCONT)
        try:
            self._end(signal.SIGTERM, timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"{self.name} did not end within {timeout_s:g} s of SIGTERM") from None

    async def ended(self, timeout_s: float = 30) -> int:
        """Wait until it ends by itself; its exit code, negative for a signal."""
        if self._process is None:
            raise AssertionError(f"{self.name} was not started")
        return await asyncio.to_thread(self._process.wait, timeout_s)

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def tail(self, lines: int = 15) -> str:
        """The end of its log."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    def _end(self, number: signal.Signals, timeout_s: float) -> None:
        if self._process is not None and self.alive:
            self.send(number)
            self._process.wait(timeout_s)


def running(pid: int) -> bool:
    """Whether a process with this id lives; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
