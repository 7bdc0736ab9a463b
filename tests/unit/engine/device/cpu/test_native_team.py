"""The team of compute threads by itself (tests/native/team.cpp): every item once, and nobody too late."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from services.engine.device.cpu.native import find_compiler
from tests.support.repository import ROOT

NATIVE = ROOT / "services/engine/device/cpu/native"
SOURCES = (ROOT / "tests/native/team.cpp", NATIVE / "team.cpp", NATIVE / "doorbell.cpp")
OPTIONS = ("-std=c++17", "-Wall", "-Wextra", "-Werror", "-g", "-pthread", f"-I{NATIVE}")
# Of so many items that each thread has some, and of more threads than cores.
SIZES = (1, 2, 3, 5, 8)


def build(program: Path, *options: str) -> Path:
    command = [*find_compiler(), *OPTIONS, *options, *map(str, SOURCES), "-o", str(program)]
    subprocess.run(command, check=True)
    return program


def run(program: Path, threads: int, *, rounds: int) -> None:
    """What the program says is what it found, or a sanitizer did."""
    command = [str(program), str(threads), str(rounds), "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("team") / "team", "-O1")


@pytest.mark.parametrize("threads", SIZES)
def test_threads_that_are_stopped_anywhere_harm_nobody(program: Path, threads: int) -> None:
    run(program, threads, rounds=5)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_no_thread_touches_what_it_has_left(sanitizer: str, tmp_path: Path) -> None:
    program = build(tmp_path / "team", "-O1", f"-fsanitize={sanitizer}")
    for threads in SIZES:
        run(program, threads, rounds=30)
