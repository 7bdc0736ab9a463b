"""What software engines run on, and how the rest is refused."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib

import pytest

from catenary.gaudi import IMAGE, PYTHONS, RELEASES, too_old
from tests.support.repository import ROOT


@pytest.mark.parametrize("version", ["1.21.3", "1.21.0.555", "1.19.1", "0.9", "1.9.0"])
def test_older_software_is_refused_with_the_image_to_take(version: str) -> None:
    refusal = too_old(version)
    assert refusal is not None
    assert refusal.startswith(f"Habana software {version} is too old")
    assert IMAGE in refusal
    assert "\n" not in refusal


@pytest.mark.parametrize("version", ["1.22.0", "1.22.2.32", "1.23.0.695", "1.24.1", "1.30.0", "2.0", "what"])
def test_other_software_is_left_to_the_other_checks(version: str) -> None:
    assert too_old(version) is None


def test_the_image_is_one_of_the_table() -> None:
    _, software, system, _, installer = IMAGE.split("/")
    release = RELEASES[tuple(map(int, software.split(".")[:2]))]  # type: ignore[index]
    assert tuple(map(int, installer.removeprefix("pytorch-installer-").split(".")[:2])) in release.torches
    assert system == "ubuntu24.04"


def test_the_pythons_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11,<3.13"
    assert PYTHONS == ((3, 11), (3, 12))


@pytest.mark.parametrize("module", ["services.engine", "catenary_apps.cli.main", "gateway"])
def test_python_3_10_is_refused_in_one_line_whatever_is_started(module: str) -> None:
    code = (
        "import sys, runpy; sys.version_info = (3, 10, 12, 'final', 0); "
        f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "Catenary needs Python 3.11 or 3.12, and this is Python 3.10."
    )
    assert IMAGE in done.stderr
    assert "Traceback" not in done.stderr


def test_the_package_that_says_so_is_written_for_older_pythons() -> None:
    for name in ("catenary/__init__.py", "services/__init__.py", "services/engine/__init__.py"):
        ast.parse((ROOT / name).read_text(), feature_version=(3, 8))
