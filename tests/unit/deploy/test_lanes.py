"""tests/lanes.py: what fails in any of its processes fails the whole, and is told at the end."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import lanes

# Not of this project's configuration, which is not read for tests elsewhere; they take long to import.
QUICK = ["-p", "no:schemathesis", "-p", "no:langsmith_plugin"]


def part(directory: Path, name: str, body: str) -> str:
    path = directory / name / f"test_{name}.py"
    path.parent.mkdir()
    path.write_text(body)
    return str(path.parent)


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    # As in a shell's background job.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def test_a_failure_in_one_process_fails_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = part(tmp_path, "good", "def test_good(): pass\n")
    empty = part(tmp_path, "empty", "")
    monkeypatch.setattr(lanes, "PARTS", (good, empty))
    assert lanes.main(QUICK) == 0
    bad = part(tmp_path, "bad", "def test_bad():\n    print('seen')\n    assert 1 == 2\n")
    broken = part(tmp_path, "broken", "import nothing_of_the_sort\n")
    monkeypatch.setattr(lanes, "PARTS", (bad, broken))
    capsys.readouterr()
    assert lanes.main(QUICK) == 1
    live, summary = capsys.readouterr().out.split("\n\n", 1)
    assert f"{bad} | seen" in live
    assert f"{bad} FAILED (exit code 1)" in summary
    assert f"{broken} FAILED (exit code 2)" in summary
    assert "    FAILED " in summary
    assert "    ERROR " in summary


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_all_processes_and_what_they_started(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
) -> None:
    fifo, ended = tmp_path / "started", tmp_path / "ended"
    os.mkfifo(fifo)
    body = (
        "import pathlib, pytest, threading\n"
        "@pytest.fixture\n"
        f"def service():\n    yield\n    pathlib.Path({str(ended)!r}).touch()\n"
        f"def test_long(service):\n    open({str(fifo)!r}, 'w').close()\n    threading.Event().wait()\n"
    )
    monkeypatch.setattr(lanes, "PARTS", (part(tmp_path, "long", body), part(tmp_path, "next", "")))
    monkeypatch.setattr(lanes, "LANES", 1)

    def interrupt() -> None:
        fifo.open().close()
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert lanes.main(QUICK) == 1
    thread.join()
    assert ended.exists()
    assert "was not run" in capsys.readouterr().out
