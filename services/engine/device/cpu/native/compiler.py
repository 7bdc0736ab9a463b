"""The C++ compiler of this machine."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence

_NAMES = ("c++", "g++", "clang++")
_TIMEOUT_S = 600.0


class BuildError(Exception):
    """There is no compiler, it refused the sources, or there is no safe place for a library. One line."""


def find_compiler() -> tuple[str, ...] | None:
    """The C++ compiler as words of a command: `$CXX`, such as `ccache g++`, or the first of c++, g++ and
    clang++ on the path. None if there is none.
    """
    chosen = os.environ.get("CXX")
    try:
        commands = [shlex.split(chosen)] if chosen else [[name] for name in _NAMES]
    except ValueError:
        return None
    for words in commands:
        if words and (program := shutil.which(words[0])):
            return (program, *words[1:])
    return None


def identity(compiler: Sequence[str]) -> bytes:
    """What tells one compiler from another: what it says of itself, and the words it is called with."""
    return " ".join([run([*compiler, "--version"]), *compiler[1:]]).encode()


def run(command: Sequence[str]) -> str:
    """What a command says. Raises BuildError if it fails."""
    try:
        # Compilers complain in the encoding of their locale.
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False, timeout=_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} did not run: {type(error).__name__}") from error
    if done.returncode != 0:
        complaint = next((line for line in done.stderr.splitlines() if "error" in line), "it said nothing")
        raise BuildError(f"{command[0]} failed: {complaint.strip()}")
    return done.stdout
