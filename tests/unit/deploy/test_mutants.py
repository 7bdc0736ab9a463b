"""The stored mutations of `make mutants` still fit the code; what its runner refuses."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.repository import ROOT


@pytest.fixture(scope="module")
def runner() -> Iterator[ModuleType]:
    sys.path.insert(0, str(ROOT / "deploy" / "mutants"))
    try:
        yield importlib.import_module("run")
    finally:
        sys.path.remove(str(ROOT / "deploy" / "mutants"))
        for name in ("run", "mutations"):
            sys.modules.pop(name, None)


def test_each_mutation_applies_and_names_a_test_that_exists(runner: Any) -> None:
    traps = [mutation.trap for mutation in runner.MUTATIONS]
    assert len(set(traps)) == len(traps)
    for mutation in runner.MUTATIONS:
        assert (ROOT / mutation.file).read_text(encoding="utf-8").count(mutation.old) == 1, mutation.trap
        assert mutation.new != mutation.old
        file, _, name = mutation.test.partition("::")
        defined = re.findall(r"^(?:async )?def (test_\w+)", (ROOT / file).read_text(encoding="utf-8"), re.M)
        assert name.partition("[")[0] in defined, mutation.trap


@pytest.mark.parametrize(("text", "found"), [("a b", 0), ("x x", 2)])
def test_a_mutation_that_does_not_fit_is_refused(runner: Any, tmp_path: Path, text: str, found: int) -> None:
    (tmp_path / "code.py").write_text(text, encoding="utf-8")
    mutation = sys.modules["mutations"].Mutation("trap", "reason", "code.py", "x", "y", "test")
    with pytest.raises(runner.MutantError, match=f"has the mutation's text {found} times, not once"):
        runner.apply(mutation, tmp_path)
    assert (tmp_path / "code.py").read_text(encoding="utf-8") == text
