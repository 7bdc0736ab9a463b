"""The page of advisories, and what `make audit` prints."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.repository import ROOT


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


advisories = load("docs/advisories.py")
audit = load("deploy/safety/audit.py")

ENTRY = '[[advisory]]\ntopic = "T"\nids = ["CVE-1-1", "GHSA-a"]\npart = "part"\nattack = "attack"\n'
DEFENCE = ENTRY + 'defence = "wall"\n'
REASON = ENTRY.replace("CVE-1-1", "CVE-2-2").replace("GHSA-a", "GHSA-b") + 'reason = "no door"\n'
TESTS = """
import pytest

@pytest.mark.advisory("CVE-1-1")
@pytest.mark.parametrize("x", [1])
async def test_one(x): ...

class TestOther:
    @pytest.mark.advisory("GHSA-a")
    def test_two(self): ...

def test_three(): ...
"""


def page(directory: Path, table: str, source: str = TESTS) -> str:
    (directory / "tests" / "unit").mkdir(parents=True)
    (directory / "tests" / "unit" / "test_it.py").write_text(source)
    (directory / "table.toml").write_text(table)
    return str(advisories.page(directory / "table.toml", directory / "tests"))


def test_a_row_has_the_tests_of_all_its_ids(tmp_path: Path) -> None:
    lines = page(tmp_path, DEFENCE + REASON).splitlines()
    tests = "`tests/unit/test_it.py::test_one`<br>`tests/unit/test_it.py::TestOther`"
    assert f"| CVE-1-1, GHSA-a | part: attack | wall | {tests} |" in lines
    assert lines[-1] == "| CVE-2-2, GHSA-b | part: attack | no door |"


def test_markers_of_a_module_and_of_a_parameter(tmp_path: Path) -> None:
    source = (
        'import pytest\npytestmark = [pytest.mark.advisory("CVE-1-1")]\n'
        '@pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.advisory("GHSA-a"))])\n'
        "def test_one(x): ...\n"
    )
    assert "| `tests/unit/test_it.py`<br>`tests/unit/test_it.py::test_one` |" in page(
        tmp_path, DEFENCE, source
    )


@pytest.mark.parametrize(
    ("table", "source", "problem"),
    [
        (DEFENCE, "", "CVE-1-1: a defence, and no test with its marker"),
        (ENTRY + 'reason = "r"\n', TESTS, "CVE-1-1: a test has its marker, though it does not apply"),
        (REASON, TESTS, "CVE-1-1: marked in tests/unit/test_it.py::test_one, and not in the table"),
        (DEFENCE + 'reason = "r"\n', TESTS, "CVE-1-1: an entry has a defence or a reason"),
        (ENTRY, TESTS, "CVE-1-1: an entry has a defence or a reason"),
        (DEFENCE + DEFENCE, TESTS, "CVE-1-1, GHSA-a: in two entries of the table"),
        (DEFENCE, TESTS + "x = pytest.mark.advisory(NAME)\n", "an id is a plain text"),
        (DEFENCE, TESTS + "x = pytest.mark.advisory()\n", "the marker takes ids"),
    ],
)
def test_what_does_not_fit_together_is_named(tmp_path: Path, table: str, source: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        page(tmp_path, table, source)


def finding(name: str, *ids: str, fixed: tuple[str, ...] = ()) -> dict[str, Any]:
    vulnerability = {"id": ids[0], "aliases": list(ids[1:]), "fix_versions": list(fixed)}
    return {"name": name, "version": "1.0", "vulns": [vulnerability]}


def test_findings_are_shown_with_their_reasons() -> None:
    sound = {"name": "b", "version": "2", "vulns": []}
    unknown = {"name": "c", "skip_reason": "not found"}
    found = [finding("a", "PYSEC-1", "CVE-1", fixed=("1.1",)), finding("d", "CVE-9"), sound, unknown]
    assert audit.report({"dependencies": found}, {"CVE-1": "not called", "CVE-7": "old"}) == [
        "3 packages audited, 2 findings",
        "a 1.0: PYSEC-1, CVE-1; mended in 1.1; explained: not called",
        "d 1.0: CVE-9; mended in no version yet; NOT EXPLAINED",
        "explained.toml: CVE-7 is found no more: remove it",
        "not audited, since the service does not know them: c",
    ]


def test_a_service_that_knows_no_package_has_audited_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unknown = {"dependencies": [{"name": "c", "skip_reason": "not found"}]}
    assert audit.report(unknown, {}) is None
    answers: dict[str, Any] = {"pypi": unknown, "osv": None}
    monkeypatch.setattr(audit, "run_pip_audit", lambda service, files: answers[service])
    assert audit.main() == 0
    said = "make audit: no vulnerability service is reachable: nothing was audited\n"
    assert capsys.readouterr().out == said
    answers["osv"] = {"dependencies": [{"name": "c", "version": "1", "vulns": []}]}
    assert audit.main() == 0
    assert capsys.readouterr().out == "make audit: by osv: 1 packages audited, 0 findings\n"


def test_explanations_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "explained.toml"
    path.write_text('[[explained]]\nid = "CVE-1"\npackage = "a"\nreason = "r"\n')
    assert audit.read_explained(path) == {"CVE-1": "r"}
    path.write_text('[[explained]]\nid = "CVE-1"\npackage = "a"\n')
    with pytest.raises(ValueError, match="an entry needs id, package and reason"):
        audit.read_explained(path)
    audit.read_explained(audit.EXPLAINED)
