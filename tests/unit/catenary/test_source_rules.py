"""What the services' own source must not hold, whatever else they do."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
# The services that read what strangers send.
FACING_CLIENTS = ("gateway", "services/router", "services/tokenizer")
EVERYTHING = ("catenary", "gateway", "services")
HTTP_CLIENTS = (
    "httpx",
    "httpx2",
    "requests",
    "aiohttp",
    "urllib3",
    "urllib.request",
    "http.client",
    "pycurl",
)
UNPICKLERS = ("pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib")
RUNNERS = ("eval", "exec")


def modules(packages: tuple[str, ...]) -> Iterator[tuple[str, ast.Module]]:
    for package in packages:
        for path in sorted((ROOT / package).rglob("*.py")):
            if "catenary/v1" not in path.as_posix():
                yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def importers(packages: tuple[str, ...], forbidden: tuple[str, ...]) -> list[str]:
    return [
        f"{where}: {name}"
        for where, tree in modules(packages)
        for name in imports(tree)
        if any(name == one or name.startswith(f"{one}.") for one in forbidden)
    ]


@pytest.mark.advisory("CVE-2025-6242", "CVE-2026-0599", "CVE-2026-34753")
def test_services_that_face_clients_have_no_http_client() -> None:
    assert importers(FACING_CLIENTS, HTTP_CLIENTS) == []


@pytest.mark.advisory("CVE-2025-32444", "CVE-2025-24357")
def test_nothing_unpickles() -> None:
    assert importers(EVERYTHING, UNPICKLERS) == []
    loads = [
        f"{where}:{node.lineno}"
        for where, tree in modules(EVERYTHING)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "numpy.load", "np.load")
    ]
    assert loads == []


@pytest.mark.advisory("CVE-2025-9141")
def test_no_text_is_run() -> None:
    found = [
        f"{where}:{node.lineno}"
        for where, tree in modules(EVERYTHING)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in RUNNERS
    ]
    assert found == []


@pytest.mark.advisory("CVE-2026-41523")
def test_no_check_is_an_assertion() -> None:
    found = [
        f"{where}:{node.lineno}"
        for where, tree in modules(EVERYTHING)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert)
    ]
    assert found == []


def test_the_rules_see_what_they_forbid() -> None:
    tree = ast.parse("import pickle\nfrom urllib import request\nimport http.client as c\n")
    assert list(imports(tree)) == ["pickle", "urllib", "urllib.request", "http.client"]
    assert len(list(modules(EVERYTHING))) > 300
