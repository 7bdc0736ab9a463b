"""Every script that measures can be imported and says what it is for: none rots unseen."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

import benchmarks.peers

ROOT = Path(benchmarks.peers.__file__).parents[1]
SCRIPTS = sorted(
    ".".join(file.relative_to(ROOT.parent).with_suffix("").parts)
    for file in ROOT.rglob("*.py")
    if "__main__" in file.read_text(encoding="utf-8")
)


def test_there_are_scripts() -> None:
    assert len(SCRIPTS) >= 25
    assert {"benchmarks.compare", "benchmarks.smoke", "benchmarks.peers.setup"} <= set(SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS)
def test_script_has_a_command_line(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    # As a program: a module of that name may be there already, and is left alone.
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT.parent / Path(*script.split("."))) + ".py", run_name="__main__")
    assert not ended.value.code
    assert capsys.readouterr().out.startswith("usage: ")


def test_scripts_stand_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    # Deeper ones are parts of these.
    assert [name for name in SCRIPTS if name.count(".") == 1 and name not in text] == []
