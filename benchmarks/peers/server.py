"""A server under measurement: started, timed to its first answer, put to sleep, ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil

from benchmarks.peers.environments import PeerError
from benchmarks.peers.subjects import Subject, clean_environment
from catenary_apps.up.child import wrapped

_POLL_S = 0.1
_END_S = 30.0
_REST_S = 1.0
_TAIL_LINES = 8


class Server:
    """One process group, or the tree below it. It dies with this process."""

    def __init__(self, subject: Subject, url: str, log: Path) -> None:
        self.subject = subject
        self.url = url
        self.log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Of the process that was started. Raises PeerError."""
        if self._process is None:
            raise PeerError(f"{self.subject.name} does not run")
        return self._process.pid

    def start(self, timeout_s: float) -> float:
        """Starts it; returns the seconds until it had answered a request. Raises PeerError."""
        if self._answers():
            raise PeerError(f"{self.url} is somebody else's already: {self.subject.name} cannot have it")
        environment = {**clean_environment(), **self.subject.environment}
        started = time.monotonic()
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                wrapped(tuple(self.subject.command)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        while not self._answers():
            if (ended := self.ended()) is not None:
                raise PeerError(ended)
            if time.monotonic() - started > timeout_s:
                self.stop()
                raise PeerError(f"{self.subject.name} gave no answer in {timeout_s:g} s: {self._tail()}")
            time.sleep(_POLL_S)
        return time.monotonic() - started

    def ended(self) -> str | None:
        """How it ended by itself, and its last words; None while it runs."""
        code = None if self._process is None else self._process.poll()
        return None if code is None else f"{self.subject.name} ended with code {code}: {self._tail()}"

    def stop(self) -> None:
        """Ends it and all that it started. Idempotent."""
        if self._process is None:
            return
        self.wake()
        tree = self._tree()
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        # What it should have ended itself.
        _, alive = psutil.wait_procs(tree, timeout=_REST_S)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        psutil.wait_procs(alive, timeout=_REST_S)
        self._process = None

    def rest(self) -> None:
        """Stops it where it is, if it bears that, so that it takes nothing from the others."""
        if self.subject.sleeps:
            self._signal(signal.SIGSTOP)

    def wake(self) -> None:
        """Lets it go on."""
        if self.subject.sleeps:
            self._signal(signal.SIGCONT)

    def cpu_seconds(self) -> float:
        """User and system time of its live processes and their ended children."""
        total = 0.0
        for process in self._tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def _answers(self) -> bool:
        body = {"model": self.subject.model, "prompt": "Hello", "max_tokens": 1, **self.subject.extra_body}
        data = json.dumps({name: value for name, value in body.items() if value is not None}).encode()
        request = urllib.request.Request(
            f"{self.url}/v1/completions", data, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return bool(answer.status == 200)
        except urllib.error.HTTPError as error:
            if 400 <= error.code < 500 and error.code not in (404, 429):
                raise PeerError(f"{self.subject.name} refuses a request: {error.read()[:300]!r}") from None
            return False
        except OSError:
            return False

    def _signal(self, number: signal.Signals) -> None:
        for process in self._tree():
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                os.kill(process.pid, number)

    def _tree(self) -> list[psutil.Process]:
        if self._process is None:
            return []
        try:
            root = psutil.Process(self._process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        return " | ".join(lines) + f" (log: {self.log})"
