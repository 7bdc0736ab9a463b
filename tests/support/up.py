"""`catenary up` as a process, and what it leaves running."""

from __future__ import annotations

import queue
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.service_process import clean_environment

MODEL = "SmolLM2-135M-Instruct"
QUESTION = "Name the capital of France."


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def two_free_ports() -> int:
    """Return the first of two free ports that follow one another."""
    while True:
        port = free_port()
        with suppress(OSError), socket.create_server(("127.0.0.1", port + 1)):
            return port


def wait_for(condition: Callable[[], Any], timeout_s: float) -> Any:
    """Return the first true value of `condition`."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.05)
    return value


def processes() -> dict[int, tuple[int, str]]:
    """Return parent and command line of every process that is not a zombie."""
    found: dict[int, tuple[int, str]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state, parent = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:2]
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if state != "Z":
            found[int(entry.name)] = (int(parent), command)
    return found


def descendants(ancestor: int) -> dict[int, str]:
    """Return the command lines of all processes below one."""
    table = processes()
    found: dict[int, str] = {}
    frontier = [ancestor]
    while frontier:
        parent = frontier.pop()
        children = {pid: command for pid, (above, command) in table.items() if above == parent}
        found |= children
        frontier += children
    return found


class Up:
    """A running `catenary up`, or another `command` that ends in one and takes no port as a flag."""

    def __init__(self, scratch: Path, *options: str, command: str = "up", **environment: str) -> None:
        self.scratch = scratch
        self.port, self.router_port, self.tokenizer_port = free_port(), free_port(), free_port()
        places = {
            "CATENARY_UP_PORT": str(self.port),
            "CATENARY_UP_ROUTER_PORT": str(self.router_port),
            "CATENARY_UP_TOKENIZER_PORT": str(self.tokenizer_port),
            "CATENARY_UP_LOG_DIR": str(scratch / "logs"),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "catenary_apps.cli.main", command, *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=clean_environment() | {"TMPDIR": str(scratch)} | places | environment,
        )
        self.lines: list[str] = []
        self._arrived: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def url(self) -> str:
        """Base URL of the first gateway."""
        return f"http://127.0.0.1:{self.port}"

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            self._arrived.put(self.lines[-1])

    def line_with(self, pattern: str, timeout_s: float) -> str:
        """Wait for a line that matches; lines are looked at once."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                line = self._arrived.get(timeout=max(deadline - time.monotonic(), 0.01))
            except queue.Empty:
                pytest.fail(f"no line with {pattern!r} in:\n" + "\n".join(self.lines))
            if re.search(pattern, line):
                return line

    def ask(self, **options: Any) -> httpx2.Response:
        """Send one chat request."""
        body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 24}
        body["model"] = MODEL
        return httpx2.post(f"{self.url}/v1/chat/completions", json=body | options, timeout=60)

    def service(self, module: str) -> int | None:
        """Return the process id of a service, None if it does not run."""
        found = [
            pid
            for pid, (above, command) in processes().items()
            if above == self.process.pid and module in command
        ]
        return found[0] if found else None

    def close(self) -> None:
        """End the supervisor at once; its children die with it."""
        self.process.kill()
        self.process.wait(10)
