"""The host as the checks see it: files below a root, commands, packages and limits."""

from __future__ import annotations

import importlib.metadata
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

MAX_FILE_BYTES = 1 << 20

Runner = Callable[[Sequence[str]], str | None]
"""Runs a command; its output, or None if it is not there, fails or takes too long."""


def command_runner(timeout_s: float) -> Runner:
    """Runs commands of this machine."""

    def run(command: Sequence[str]) -> str | None:
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=timeout_s,
                check=False,
                # Some of the vendor's tools write logs below the home directory, which may be read-only.
                env={"HABANA_LOGS": "/tmp/habana_logs", **os.environ},
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else None

    return run


def installed_version(package: str) -> str | None:
    """The version of a package of this Python, without importing it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def locked_memory_limit() -> int | None:
    """Bytes that this process may lock; None: any number."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def open_files_limit() -> int | None:
    """Files that this process may open, at its hard limit; None: any number."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if hard == resource.RLIM_INFINITY else hard


def _open_at_once(path: str, flags: int) -> int:
    # A pipe in a place of a file would wait for its writer for ever.
    return os.open(path, flags | os.O_NONBLOCK)


@dataclass(frozen=True)
class Host:
    """Where the checks look. Tests give a tree of their own, and answers in place of commands."""

    root: Path = Path("/")
    run: Runner = field(default_factory=lambda: command_runner(20.0))
    package: Callable[[str], str | None] = installed_version
    python: tuple[int, int] = (sys.version_info[0], sys.version_info[1])
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    locked_memory: Callable[[], int | None] = locked_memory_limit
    open_files: Callable[[], int | None] = open_files_limit

    def path(self, name: str) -> Path:
        """A path below the root, from an absolute one."""
        return self.root / name.lstrip("/")

    def text(self, name: str) -> str | None:
        """A file's text without the space around it; None if it cannot be read."""
        try:
            with open(self.path(name), "rb", opener=_open_at_once) as file:
                return file.read(MAX_FILE_BYTES).decode("utf-8", "replace").strip()
        except OSError:
            return None

    def number(self, name: str) -> int | None:
        """A file's number, decimal or with its prefix; None if it holds none."""
        try:
            return int(self.text(name) or "", 0)
        except ValueError:
            return None

    def exists(self, name: str) -> bool:
        """Whether there is such a file or directory."""
        return self.path(name).exists()

    def names(self, pattern: str) -> list[str]:
        """Absolute names that match a pattern such as /sys/class/accel/accel*, in order."""
        found = sorted(self.root.glob(pattern.lstrip("/")), key=lambda path: (len(path.name), path.name))
        return ["/" + path.relative_to(self.root).as_posix() for path in found]
