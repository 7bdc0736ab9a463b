"""Which imports are read from a tree of source, and the circles and chains among them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

Tree = Callable[[Mapping[str, str]], Path]


def edges(import_graph: Any, root: Path) -> set[tuple[str, str, str, bool]]:
    graph = import_graph.ImportGraph(root, ("a", "b"))
    return {(edge.source, edge.target, edge.kind, edge.face) for edge in graph.edges}


def test_imports_are_told_apart_by_when_they_run(import_graph: Any, tree: Tree) -> None:
    source = """
        from typing import TYPE_CHECKING
        from importlib import import_module
        if TYPE_CHECKING:
            from a.typed import T
        try:
            import a.tried
        except ImportError:
            import a.instead
        class Holder:
            from a.held import thing
            def method(self):
                from a.late import thing
        async def later():
            with open("x"):
                import_module("a.by_name")
    """
    names = ("typed", "tried", "instead", "held", "late", "by_name")
    root = tree({"a/one.py": source, **{f"a/{name}.py": "" for name in names}})
    kinds = {target: kind for source, target, kind, face in edges(import_graph, root) if not face}
    assert kinds == {
        "a.typed": "typing",
        "a.tried": "run",
        "a.instead": "run",
        "a.held": "run",
        "a.late": "late",
        "a.by_name": "late",
    }


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        # Its own package has begun before it, so that only the import that names it counts.
        ("from a import other", {("a.other", False), ("a", True)}),
        ("from a.other import thing", {("a.other", False)}),
        ("from . import other", {("a.other", False), ("a", True)}),
        ("from .other import thing", {("a.other", False)}),
        ("from a import thing", {("a", False)}),
        # A foreign package's face runs before its modules.
        ("from b.inner.leaf import thing", {("b.inner.leaf", False), ("b.inner", True), ("b", True)}),
        ("from b.inner import leaf", {("b.inner.leaf", False), ("b.inner", True), ("b", True)}),
        ("import b.inner.leaf", {("b.inner.leaf", False), ("b.inner", True), ("b", True)}),
    ],
)
def test_an_import_also_runs_the_faces_on_its_way(
    import_graph: Any, tree: Tree, statement: str, expected: set[tuple[str, bool]]
) -> None:
    root = tree({"a/one.py": statement, "a/other.py": "thing = 1", "b/inner/leaf.py": "thing = 1"})
    found = {(target, face) for source, target, _, face in edges(import_graph, root) if source == "a.one"}
    assert found == expected


def test_generated_stubs_are_foreign(import_graph: Any, tree: Tree) -> None:
    root = tree({"a/v1/x_pb2_grpc.py": "import grpc", "a/one.py": "from a.v1 import x_pb2_grpc"})
    graph = import_graph.ImportGraph(root, ("a",))
    assert sorted(graph.modules) == ["a", "a.one", "a.v1"]
    assert graph.foreign_of("a.one") == {"a.v1.x_pb2_grpc"}


def test_foreign_imports_keep_their_full_names(import_graph: Any, tree: Tree) -> None:
    root = tree(
        {"a/one.py": "import torch.nn\nfrom asyncio import Queue\nfrom google.protobuf import message"}
    )
    graph = import_graph.ImportGraph(root, ("a",))
    assert graph.foreign_of("a.one") == {"torch.nn", "asyncio", "google.protobuf"}


def test_circles_are_the_strongly_connected_components_largest_first(import_graph: Any) -> None:
    targets = {
        "a": {"b"},
        "b": {"c", "x"},
        "c": {"a"},
        "x": {"y"},
        "y": {"x", "z"},
        "z": set(),
        "alone": {"alone", "a"},
    }
    assert import_graph.circles(targets) == [["a", "b", "c"], ["x", "y"]]


def test_a_long_chain_needs_no_deep_stack(import_graph: Any) -> None:
    targets = {str(number): {str(number + 1)} for number in range(5000)}
    targets["5000"] = {"0"}
    assert len(import_graph.circles(targets)[0]) == 5001


def test_chains_are_shortest(import_graph: Any) -> None:
    targets = {"a": {"b", "c"}, "b": {"d"}, "c": {"e"}, "d": {"f"}, "e": {"d"}, "f": set()}
    assert import_graph.chain_to(import_graph.chains(targets, "a"), "f") == ["a", "b", "d", "f"]
