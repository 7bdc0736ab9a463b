"""tests/lanes.py: what fails in any of its processes fails the whole, and is told at the end."""

from __future__ import annotations

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
