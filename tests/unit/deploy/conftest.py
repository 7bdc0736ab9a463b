"""The scripts of deploy/checks as modules, and small trees of source for them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

CHECKS = Path(__file__).resolve().parents[3] / "deploy" / "checks"


@pytest.fixture(scope="session", autouse=True)
def _checks_on_path() -> Iterator[None]:
    sys.path.insert(0, str(CHECKS))
    yield
    sys.path.remove(str(CHECKS))


@pytest.fixture
def import_graph() -> Any:
    return import_module("import_graph")


@pytest.fixture
def laws() -> Any:
    return import_module("laws")


@pytest.fixture
def house() -> Any:
    return import_module("house")


@pytest.fixture
def chat_files() -> Any:
    return import_module("chat_files")


@pytest.fixture
def tree(tmp_path: Path) -> Callable[[Mapping[str, str]], Path]:
    """Writes files with the given text below a root, and an empty face into each folder of theirs."""

    def write(files: Mapping[str, str]) -> Path:
        for path, text in files.items():
            file = tmp_path / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(dedent(text), encoding="utf-8")
            folder = file.parent
            while file.suffix == ".py" and folder != tmp_path:
                (folder / "__init__.py").touch()
                folder = folder.parent
        return tmp_path

    return write
