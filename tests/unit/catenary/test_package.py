"""The package `catenary` as a program imports it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import catenary

ROOT = Path(catenary.__file__).parents[1]


def imported(directory: Path, name: str) -> str:
    """The last line of stderr of a program in `directory` that imports a name from catenary."""
    program = directory / "program.py"
    program.write_text(f"from catenary import {name}\n")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(program)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    return done.stderr.strip().rpartition("\n")[2]


@pytest.mark.parametrize("package", ["catenary_apps", "gateway", "services"])
def test_a_foreign_package_of_the_same_name_is_named(tmp_path: Path, package: str) -> None:
    foreign = tmp_path / package
    foreign.mkdir()
    (foreign / "__init__.py").touch()
    assert imported(tmp_path, "SamplingParams") == (
        f"ImportError: catenary.SamplingParams needs Catenary's package {package!r}, and {foreign} has the "
        "same name and is found first: rename it, or start the program from another directory"
    )


def test_a_foreign_module_of_the_same_name_is_named(tmp_path: Path) -> None:
    (tmp_path / "services.py").touch()
    assert f"and {tmp_path / 'services.py'} has the same name" in imported(tmp_path, "LLM")


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="module 'catenary' has no attribute 'Nothing'"):
        catenary.Nothing  # noqa: B018
