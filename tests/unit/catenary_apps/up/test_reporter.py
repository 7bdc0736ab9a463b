from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from rich.console import Console

from catenary_apps.up.reporter import PlainReporter, TerminalReporter, make_reporter


@contextmanager
def standard_output(fd: int, encoding: str = "utf-8") -> Iterator[None]:
    """Standard output is the file of descriptor `fd`, which is closed at the end."""
    before = sys.stdout
    sys.stdout = os.fdopen(fd, "w", encoding=encoding)
    try:
        yield
    finally:
        stream, sys.stdout = sys.stdout, before
        stream.close()


def test_a_reader_that_left_loses_lines_and_nothing_else() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with standard_output(writer):
        for reporter in (PlainReporter(), TerminalReporter()):
            reporter.line("engine-0 was ended by SIGKILL")
            reporter.activity("engine-0", "loading weights", 0.5)
            reporter.close()


def test_a_full_disk_loses_lines_and_nothing_else() -> None:
    with standard_output(os.open("/dev/full", os.O_WRONLY)):
        for reporter in (PlainReporter(), TerminalReporter()):
            reporter.line("engine-0 was ended by SIGKILL")
            reporter.close()


def test_a_reader_that_stopped_does_not_hold_the_supervisor_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("catenary_apps.up.reporter.WRITABLE_S", 0.01)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while os.write(writer, b"x" * 4096):
            pass
    os.set_blocking(writer, True)
    with standard_output(writer):
        reporter = PlainReporter()
        reporter.line("lost")
        assert b"lost" not in os.read(reader, 1 << 20)
        reporter.line("seen")
    assert os.read(reader, 1 << 20) == b"seen\n"
    os.close(reader)


def test_a_character_that_the_encoding_lacks_is_an_escape() -> None:
    reader, writer = os.pipe()
    with standard_output(writer, "ascii"):
        PlainReporter().line("the log /srv/m\u00fcll \ud800 cannot be written")
    assert os.read(reader, 100) == b"the log /srv/m\\xfcll \\ud800 cannot be written\n"
    os.close(reader)


def test_plain_lines_come_once_per_change(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = make_reporter()
    assert isinstance(reporter, PlainReporter)
    reporter.activity("engine-0", "loading weights", 0.1)
    reporter.activity("engine-0", "loading weights", 0.9)
    reporter.done("engine-0", "serving")
    assert capsys.readouterr().out == "engine-0: loading weights\nengine-0: serving\n"


def test_a_terminal_shows_bars_while_it_starts_and_leaves_lines_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(
        "rich.console.Console",
        lambda **options: Console(**options | {"file": screen, "force_terminal": True, "width": 40}),
    )
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    reporter = make_reporter()
    assert isinstance(reporter, TerminalReporter)
    reporter.activity("engine-0", "loading [weights]", 0.5)
    command = "curl http://127.0.0.1:8000/ -d '[1, \"x\"]' " + "y" * 100
    reporter.line(command)
    reporter.done("engine-0", "serving")
    reporter.close()
    reporter.close()
    shown = screen.getvalue()
    assert "engine-0" in shown
    assert "loading [weights]" in shown
    assert command in shown
