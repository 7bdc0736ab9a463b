"""What the services' own source must not hold, whatever else they do."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.repository import ROOT

# The services that read what strangers send.
FACING_CLIENTS = ("gateway/", "services/router/", "services/tokenizer/")
PACKAGES = ("catenary", "catenary_apps", "catenary_testing", "gateway", "services")
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
LOADERS = ("torch.load", "numpy.load", "np.load")
RUNNERS = ("eval", "exec")
# Only catenary/directories.py asks for home directories: these return `/` or fail for a user who has none.
HOMES = ("expanduser", "home")


@dataclass
class Source:
    """What a module imports, calls and asserts; the latter as line numbers."""

    imports: set[str] = field(default_factory=set)
    calls: set[str] = field(default_factory=set)
    assertions: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, text: str) -> Source:
        """Of a module's text."""
        found = cls()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                found.imports.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.imports.add(node.module)
                found.imports.update(f"{node.module}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
                found.calls.add(ast.unparse(node.func))
            elif isinstance(node, ast.Assert):
                found.assertions.append(node.lineno)
        return found


@functools.cache
def sources() -> dict[str, Source]:
    """All modules but the generated ones, by path."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    named = {path.relative_to(ROOT).as_posix(): path for path in paths}
    return {
        where: Source.of(path.read_text(encoding="utf-8"))
        for where, path in named.items()
        if not where.startswith("catenary/v1/")
    }


def importers(forbidden: tuple[str, ...], within: tuple[str, ...] = ("",)) -> Iterator[str]:
    for where, source in sources().items():
        if where.startswith(within):
            for name in source.imports:
                if any(name == one or name.startswith(f"{one}.") for one in forbidden):
                    yield f"{where}: {name}"


def callers(forbidden: tuple[str, ...]) -> list[str]:
    return [where for where, source in sources().items() if source.calls.intersection(forbidden)]


@pytest.mark.advisory("CVE-2025-6242", "CVE-2026-0599", "CVE-2026-34753")
def test_services_that_face_clients_have_no_http_client() -> None:
    assert list(importers(HTTP_CLIENTS, FACING_CLIENTS)) == []


@pytest.mark.advisory("CVE-2025-32444", "CVE-2025-24357")
def test_nothing_unpickles() -> None:
    assert list(importers(UNPICKLERS)) == []
    assert callers(LOADERS) == []


@pytest.mark.advisory("CVE-2025-9141")
def test_no_text_is_run() -> None:
    assert callers(RUNNERS) == []


@pytest.mark.advisory("CVE-2026-41523")
def test_no_check_is_an_assertion() -> None:
    assert [where for where, source in sources().items() if source.assertions] == []


def test_one_module_finds_home_directories() -> None:
    found = [
        where
        for where, source in sources().items()
        if any(call.rpartition(".")[2] in HOMES and "." in call for call in source.calls)
    ]
    assert found == ["catenary/directories.py"]


def test_the_rules_see_what_they_forbid() -> None:
    imported = "import pickle\nfrom urllib import request\nimport http.client as c\n"
    source = Source.of(imported + "assert eval('1') == torch.load(x)\n")
    assert source.imports == {"pickle", "urllib", "urllib.request", "http.client"}
    assert source.calls == {"eval", "torch.load"}
    assert source.assertions == [4]
    assert len(sources()) > 300
    assert any(where.startswith(FACING_CLIENTS) for where in sources())


LIMIT = re.compile(r"_?[A-Z0-9_]*(MAX|MOST|LARGEST|LONGEST|TRIES|NUMBERS|REFUSED)[A-Z0-9_]*")


def unexplained(path: Path) -> Iterator[str]:
    """Names of limits, which are numbers of a module, without a comment above their group or a text below."""
    text = path.read_text()
    lines, body = text.splitlines(), ast.parse(text).body
    above = ""
    for place, node in enumerate(body):
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            above = ""
            continue
        line = lines[node.lineno - 2]
        above = line if line.startswith("#") or not line else above
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        below = body[place + 1] if place + 1 < len(body) else None
        told = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        value = node.value
        number = isinstance(value, ast.BinOp) or (
            isinstance(value, ast.Constant) and isinstance(value.value, int | float)
        )
        if isinstance(target, ast.Name) and LIMIT.fullmatch(target.id) and number and not (above or told):
            yield target.id


@pytest.mark.parametrize("package", ["gateway", "services/router"])
def test_a_limit_that_is_no_option_says_why(package: str) -> None:
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for name in unexplained(path)
        if not name.endswith("_S")
    }
    assert not found
