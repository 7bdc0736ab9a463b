"""The gateway's packages import each other in one direction only."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import gateway


def imports() -> dict[str, set[str]]:
    """Each module or package right below `gateway`, with those that it imports."""
    root = Path(gateway.__file__).parent
    graph: dict[str, set[str]] = {}
    for file in root.rglob("*.py"):
        part = file.relative_to(root).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.ImportFrom) or (node.module or "").partition(".")[0] != "gateway":
                continue
            for alias in node.names:
                target = f"{node.module}.{alias.name}".split(".")[1]
                if target != part and (root / target).with_suffix(".py").exists() | (root / target).is_dir():
                    graph.setdefault(part, set()).add(target)
    return graph


def test_no_two_packages_import_each_other() -> None:
    graph = imports()
    assert "streaming" in graph["generation"]
    # Raises CycleError, which names the circle.
    TopologicalSorter(graph).prepare()
