"""The C++ compiler of this machine."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_NAMES = ("c++", "g++", "clang++")
_GUARD = Path(__file__).with_name("guard.py")
# A compiler that does not even say its name by then will not compile.
_VERSION_S = 20.0
# For one file of the sources: the largest takes about ten seconds of a core, and the machine may be busy.
COMPILE_S = 180.0


class BuildError(Exception):
    """There is no compiler, it refused the sources, or there is no safe place for a library. One line."""


def find_compiler() -> tuple[str, ...]:
    """The C++ compiler as words of a command: `$CXX`, such as `ccache g++`, or the first of c++, g++ and
    clang++ on the path. Raises BuildError if there is none.
    """
    chosen = os.environ.get("CXX")
    if not chosen:
        if (found := _first_there()) is None:
            raise BuildError("no C++ compiler is here: install g++, or set CXX to its command")
        return (found,)
    try:
        words = shlex.split(chosen)
    except ValueError:
        words = []
    program = shutil.which(words[0]) if words else None
    if program is None:
        other = _first_there()
        instead = f"unset it to use {other}" if other is not None else "install g++"
        raise BuildError(
            f"CXX is {chosen[:200]!r}, which is no command here: {instead}, or set it to another"
        )
    return (program, *words[1:])


def _first_there() -> str | None:
    return next((program for name in _NAMES if (program := shutil.which(name))), None)


def identity(compiler: Sequence[str]) -> bytes:
    """Identifies a compiler: its output of --version, and the words that it is called with."""
    return " ".join([run([*compiler, "--version"], _VERSION_S), *compiler[1:]]).encode()


def run(command: Sequence[str], limit_s: float = COMPILE_S) -> str:
    """The output of a command. Raises BuildError if it fails, or has not ended after `limit_s` seconds.

    It ends with this process, and so do its children.
    """
    theirs, ours = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_GUARD), *command],
            stdin=theirs,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # Compilers complain in the encoding of their locale.
            errors="replace",
        )
    except OSError as error:
        os.close(ours)
        raise BuildError(f"{command[0]} did not run: {error.strerror}") from error
    finally:
        os.close(theirs)
    # Children that it left may hold its output open: leaving the block closes this end and waits for the
    # process alone.
    with process:
        try:
            output, complaints = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            raise BuildError(
                f"{command[0]} was given up: {_shown(command)} had not ended after {limit_s:g} s"
            ) from None
        finally:
            # Ends what still runs.
            os.close(ours)
    if process.returncode != 0:
        complaint = next((line for line in complaints.splitlines() if "error" in line), "it said nothing")
        raise BuildError(f"{command[0]} failed: {complaint.strip()}")
    return output


def _shown(command: Sequence[str]) -> str:
    """A command's purpose, in a word or two."""
    sources = [Path(word).name for word in command if word.endswith(".cpp")]
    return sources[0] if sources else command[-1] if command[-1].startswith("--") else "the link"
