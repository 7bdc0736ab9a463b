"""The graph of a tree's own modules: which imports which, read from the source without running it.

Imports differ by when they run: as the module is imported ("run"), when a function is called ("late", also
`import_module` of a literal name), or for type checkers alone ("typing"). Besides the module whose names it
takes, an import runs the faces (`__init__`) of the packages above that module: those are edges of their own
(`Edge.face`). The faces of the packages in which the importing module itself lies have begun before it, so
they count only where the import names one.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

Kind = str
RUN, LATE, TYPING = "run", "late", "typing"


@dataclass(frozen=True, slots=True)
class Edge:
    """One import of a module. `target`: an own module, or the top name of a foreign package."""

    source: str
    target: str
    line: int
    kind: Kind
    face: bool = False
    """The target is a package that the import passes through on its way to another module."""


@dataclass(frozen=True)
class Module:
    """An own module: its dotted name, its file below the root, and its source."""

    name: str
    path: str
    text: str
    tree: ast.Module

    @property
    def lines(self) -> int:
        """Number of lines of the file."""
        return len(self.text.splitlines())

    @property
    def is_face(self) -> bool:
        """Whether it is a package's `__init__`."""
        return self.path.endswith("/__init__.py")


def is_generated(path: str) -> bool:
    """Whether a file is a stub that protoc wrote, which is in no count."""
    name = path.rpartition("/")[2]
    return name.endswith(("_pb2.py", "_pb2_grpc.py"))


class ImportGraph:
    """The modules of some packages below a root, and their imports."""

    def __init__(self, root: Path, packages: Iterable[str]) -> None:
        """Read every Python file of `packages` (top folders; one that is missing is empty)."""
        self.modules: dict[str, Module] = {}
        stubs: set[str] = set()
        for file in sorted(file for package in packages for file in (root / package).rglob("*.py")):
            path = file.relative_to(root).as_posix()
            name = module_name(path)
            if is_generated(path):
                stubs.add(name)
                continue
            text = file.read_text(encoding="utf-8")
            self.modules[name] = Module(name, path, text, ast.parse(text))
        self._stubs = frozenset(stubs)
        self.edges: list[Edge] = []
        self.foreign: dict[str, list[Edge]] = defaultdict(list)
        """Imports of foreign modules, by own module; targets are their full dotted names."""
        for module in self.modules.values():
            for edge in self._edges_of(module):
                if edge.target in self.modules:
                    self.edges.append(edge)
                else:
                    self.foreign[module.name].append(edge)

    def targets(self, keep: Callable[[Edge], bool] = lambda _: True) -> dict[str, set[str]]:
        """Own modules that each module imports, by the edges that `keep` takes."""
        found: dict[str, set[str]] = {name: set() for name in self.modules}
        for edge in self.edges:
            if edge.target != edge.source and keep(edge):
                found[edge.source].add(edge.target)
        return found

    def foreign_of(self, name: str, kinds: Collection[Kind] = (RUN, LATE)) -> set[str]:
        """Foreign modules that an own module imports by itself, with full dotted names."""
        return {edge.target for edge in self.foreign.get(name, ()) if edge.kind in kinds}

    def _edges_of(self, module: Module) -> Iterator[Edge]:
        seen: set[Edge] = set()
        statements = [
            (base, names, node.lineno, kind)
            for node, kind in _imports(module.tree.body, RUN)
            for base, names in _named(node, module)
        ]
        if "import_module" in module.text:
            statements += ((name, [], line, LATE) for name, line in _by_name(module.tree))
        for base, names, line, kind in statements:
            for edge in self._resolved(module, base, names, line, kind):
                if edge not in seen:
                    seen.add(edge)
                    yield edge

    def _resolved(self, module: Module, base: str, names: list[str], line: int, kind: Kind) -> Iterator[Edge]:
        """Yield the edges of `from base import names`, or of `import base` without names."""
        targets: list[str] = []
        for name in names:
            inner = f"{base}.{name}"
            targets.append(inner if inner in self.modules or inner in self._stubs else base)
        for target in dict.fromkeys(targets or [base]):
            yield Edge(module.name, target, line, kind)
            if target not in self.modules and target not in self._stubs:
                continue
            own = module.name if module.is_face else module.name.rpartition(".")[0]
            for package in _above(target):
                passed = package in self.modules and package != module.name
                if passed and (not _inside(own, package) or package == base):
                    yield Edge(module.name, package, line, kind, face=True)


def module_name(path: str) -> str:
    """Return the dotted name of a file below the root."""
    name = path.removesuffix(".py").replace("/", ".")
    return name.removesuffix(".__init__")


def _above(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _inside(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def _imports(body: Iterable[ast.stmt], kind: Kind) -> Iterator[tuple[ast.Import | ast.ImportFrom, Kind]]:
    """Yield the import statements of a body with the moment at which each runs."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node, kind
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _imports(node.body, LATE if kind == RUN else kind)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _imports(node.body, TYPING)
            yield from _imports(node.orelse, kind)
        else:
            yield from _imports(_inner(node), kind)


def _by_name(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield the literal names that `import_module` is called with, and their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield name.value, node.lineno


def _inner(node: ast.stmt) -> Iterator[ast.stmt]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child
        elif isinstance(child, ast.ExceptHandler | ast.match_case):
            yield from child.body


def _named(node: ast.Import | ast.ImportFrom, module: Module) -> Iterator[tuple[str, list[str]]]:
    """Yield what a statement imports: a module's absolute name, and the names taken from it."""
    if isinstance(node, ast.Import):
        yield from ((alias.name, []) for alias in node.names)
        return
    base = node.module or ""
    if node.level:
        package = module.name if module.is_face else module.name.rpartition(".")[0]
        for _ in range(node.level - 1):
            package = package.rpartition(".")[0]
        base = f"{package}.{base}" if base else package
    yield base, [alias.name for alias in node.names]


def circles(targets: Mapping[str, Collection[str]]) -> list[list[str]]:
    """Return the strongly connected components of two and more modules, largest first, members sorted."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    waiting: set[str] = set()
    found: list[list[str]] = []
    for root in targets:
        if root in index:
            continue
        work: list[tuple[str, Iterator[str]]] = [(root, iter(sorted(targets[root])))]
        index[root] = low[root] = len(index)
        stack.append(root)
        waiting.add(root)
        while work:
            name, rest = work[-1]
            for target in rest:
                if target not in index:
                    index[target] = low[target] = len(index)
                    stack.append(target)
                    waiting.add(target)
                    work.append((target, iter(sorted(targets.get(target, ())))))
                    break
                if target in waiting:
                    low[name] = min(low[name], index[target])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[name])
                if low[name] == index[name]:
                    members: list[str] = []
                    while not members or members[-1] != name:
                        members.append(stack.pop())
                        waiting.discard(members[-1])
                    if len(members) > 1:
                        found.append(sorted(members))
    return sorted(found, key=lambda members: (-len(members), members))


def chains(targets: Mapping[str, Collection[str]], start: str) -> dict[str, str | None]:
    """Return, for each module that `start` reaches, the module before it on a shortest chain."""
    before: dict[str, str | None] = {start: None}
    edge = [start]
    while edge:
        following: list[str] = []
        for name in edge:
            for target in sorted(targets.get(name, ())):
                if target not in before:
                    before[target] = name
                    following.append(target)
        edge = following
    return before


def chain_to(before: Mapping[str, str | None], name: str) -> list[str]:
    """Return the chain that `chains` found from its start to `name`."""
    found = [name]
    while (previous := before[found[-1]]) is not None:
        found.append(previous)
    return found[::-1]
