from __future__ import annotations

import io
import sys

import pytest
from rich.console import Console

from catenary.cli.up.reporter import PlainReporter, TerminalReporter, make_reporter


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
        lambda **options: Console(file=screen, force_terminal=True, width=40, **options),
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
