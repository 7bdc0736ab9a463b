"""Check the structure of the source: the laws of the house (laws.py), the faces of packages, lines of C++.

A module outside of a package with a face (`__all__` in its `__init__`) imports only names of the face. Lines
of C++, which no formatter here looks at, stay within the width of those of Python.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import laws
from import_graph import ImportGraph

ROOT = Path(__file__).resolve().parents[2]
# The face of the first is for applications: services take its modules. That of the second is for those that
# have no torch: what needs torch is taken from its modules.
FACELESS = ("catenary", "services.engine.model")
MAX_COLUMNS = 110


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the absolute name of every import in a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            yield node.lineno, node.module


def faces() -> dict[str, list[str]]:
    """What packages say in `__all__` that is taken from them."""
    found: dict[str, list[str]] = {}
    for file in (file for package in laws.PACKAGES for file in (ROOT / package).rglob("__init__.py")):
        name = file.parent.relative_to(ROOT).as_posix().replace("/", ".")
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                found[name] = ast.literal_eval(node.value)
    return {name: names for name, names in found.items() if name not in FACELESS}


def behind(path: str, name: str, known: Mapping[str, list[str]]) -> str | None:
    """Return why the file may not reach for the module `name`, or None."""
    package, _, last = name.rpartition(".")
    if last in known.get(package, [last]) or name in known:
        return None
    module = path.removesuffix(".py").replace("/", ".")
    return None if laws.inside(module, package) else f"reaches behind the face of {package}"


def main() -> list[str]:
    problems: list[str] = []
    known = faces()
    graph = ImportGraph(ROOT, laws.PACKAGES)
    for module in graph.modules.values():
        for line, name in imports(module.tree):
            reason = behind(module.path, name, known)
            if reason is not None:
                problems.append(f"{module.path}:{line}: {reason}: {name}")
    return [*problems, *wide_lines(), *laws.problems(graph=graph)]


def wide_lines() -> Iterator[str]:
    """Yield the lines of C++ that are too wide."""
    for file in sorted(file for package in laws.PACKAGES for file in (ROOT / package).rglob("*")):
        if file.suffix in (".cpp", ".h"):
            for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
                if len(line) > MAX_COLUMNS:
                    path = file.relative_to(ROOT).as_posix()
                    yield f"{path}:{number}: longer than {MAX_COLUMNS} columns"


if __name__ == "__main__":
    sys.exit("\n".join(main()) or 0)
