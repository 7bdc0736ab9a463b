"""`catenary up` where its own small files find no room, or what it starts writes without end."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from catenary.runtime import StartRefused
from catenary_apps.cli.runtime_directory import RuntimeDirectory
from catenary_apps.up import run as preparing
from tests.support.small_disk import SmallDisk


@pytest.fixture
def full_disk(small_disk: Callable[..., SmallDisk], monkeypatch: pytest.MonkeyPatch) -> SmallDisk:
    """The temporary directory, which has room until it is filled."""
    disk = small_disk(1 << 20)
    monkeypatch.setattr(tempfile, "tempdir", str(disk.path))
    return disk


def test_a_run_that_cannot_say_what_it_is_goes_on(full_disk: SmallDisk) -> None:
    runtime = RuntimeDirectory.create()
    try:
        full_disk.fill()
        runtime.describe("port 8000, smollm2, since 12:01:07")
        assert runtime.about == ""
        full_disk.relieve()
        runtime.describe("port 8000, smollm2, since 12:01:07")
        assert runtime.about == "port 8000, smollm2, since 12:01:07"
    finally:
        runtime.remove()


def test_a_full_temporary_directory_is_refused_in_one_line(full_disk: SmallDisk) -> None:
    full_disk.fill()
    with pytest.raises(
        StartRefused, match=r"No space left on device.*: set TMPDIR to a directory with room$"
    ):
        RuntimeDirectory.create()
    full_disk.relieve()
    assert list(full_disk.path.iterdir()) == []


PREPARATION = """
import sys
sys.stderr.write("warning: " + "x" * (3 << 20) + "\\n")
sys.stderr.write("converting\\n")
sys.stderr.write({last!r})
sys.stdout.write({output!r})
sys.exit({code})
"""


@pytest.fixture
def prepare(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Path | str, list[str]]]:
    """Runs a preparation that says `last` and ends; what came of it, and what was reported."""

    def run(last: str, output: str, code: int) -> tuple[Path | str, list[str]]:
        program = PREPARATION.format(last=last, output=output, code=code)
        monkeypatch.setattr(preparing, "wrapped", lambda command: (sys.executable, "-c", program))
        lines: list[str] = []
        try:
            return asyncio.run(preparing.prepare_model("m", Path("c"), lines.append, convert_s=1)), lines
        except StartRefused as refused:
            return str(refused), lines

    return run


def test_a_preparation_may_write_lines_of_any_length(
    prepare: Callable[..., tuple[Path | str, list[str]]],
) -> None:
    directory, lines = prepare("", "/models/m\n", 0)
    assert directory == Path("/models/m")
    assert lines[0].startswith("warning: xxx")
    assert lines[-1] == "converting"
    assert max(map(len, lines)) <= 1003


def test_a_refusal_of_any_length_is_one_short_line(
    prepare: Callable[..., tuple[Path | str, list[str]]],
) -> None:
    reason, lines = prepare("error: " + "y" * 100_000 + "\n", "", 1)
    assert isinstance(reason, str)
    assert reason.startswith("yyy")
    assert len(reason) <= 1003
    assert not any("yyy" in line for line in lines)
