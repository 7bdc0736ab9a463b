"""Store which names the releases of torch have that engines run with: tests/data/torch-names.json.

    python deploy/checks/torch_names.py torch-2.7.1-*.whl torch-2.9.1-*.whl ...

Wheels are read and never imported: those of another machine do as well (pip download --no-deps
--only-binary=:all: --platform manylinux_2_28_aarch64 torch==2.7.1). Names are found by reading Python sources
and stubs, so that names which only running code makes are in no release's list.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "tests/data/torch-names.json"
# Modules of torch whose names are stored: those that the engine names, and their siblings.
MODULES = (
    "torch",
    "torch._C",
    "torch._dynamo",
    "torch._dynamo.config",
    "torch._dynamo.exc",
    "torch._dynamo.utils",
    "torch._inductor",
    "torch._inductor.config",
    "torch.autograd",
    "torch.backends",
    "torch.compiler",
    "torch.cpu",
    "torch.cuda",
    "torch.distributed",
    "torch.fx",
    "torch.library",
    "torch.nn",
    "torch.nn.functional",
    "torch.nn.modules",
    "torch.profiler",
    "torch.utils",
    "torch.utils._python_dispatch",
    "torch.utils._pytree",
    "torch.utils.backend_registration",
    "torch.version",
)
TENSOR = "torch.Tensor"
OPERATORS = "torch.ops.aten"

_WHEEL = re.compile(r"torch-(\d+\.\d+)\.")
_HEADER = re.compile(r"torch/include/ATen/ops/(\w+)_ops\.h")
# Classes whose members a tensor has.
_TENSOR_BASES = (("torch/_C/__init__.pyi", "TensorBase"), ("torch/_tensor.py", "Tensor"))


class Wheel:
    """The sources of one release, read from its wheel."""

    def __init__(self, path: Path) -> None:
        self._zip = zipfile.ZipFile(path)
        self._files = frozenset(self._zip.namelist())
        self._found: dict[str, frozenset[str]] = {}

    def tables(self) -> dict[str, frozenset[str]]:
        """The names of each stored module that this release has, of tensors, and of operators."""
        found = {module: self.names(module) for module in MODULES if self._sources(module)}
        found[TENSOR] = frozenset(name for each in _TENSOR_BASES for name in self._members(*each))
        found[OPERATORS] = frozenset(match[1] for name in self._files if (match := _HEADER.fullmatch(name)))
        return found

    def names(self, module: str) -> frozenset[str]:
        """What a module's source and stubs define or import, and the modules inside of it."""
        if module not in self._found:
            # Modules that import one another with a star end here.
            self._found[module] = frozenset()
            names = set(self._inside(module))
            for source in self._sources(module):
                names.update(
                    self._bound(
                        self._parse(source).body, module, source.endswith(("__init__.py", "__init__.pyi"))
                    )
                )
            self._found[module] = frozenset(names)
        return self._found[module]

    def _sources(self, module: str) -> list[str]:
        base = module.replace(".", "/")
        ways = (f"{base}.py", f"{base}.pyi", f"{base}/__init__.py", f"{base}/__init__.pyi")
        return [name for name in ways if name in self._files]

    def _inside(self, module: str) -> Iterator[str]:
        prefix = module.replace(".", "/") + "/"
        for name in self._files:
            if name.startswith(prefix) and name.endswith((".py", ".pyi")):
                yield name.removeprefix(prefix).partition("/")[0].partition(".")[0]

    def _parse(self, source: str) -> ast.Module:
        return ast.parse(self._zip.read(source))

    def _members(self, source: str, name: str) -> Iterator[str]:
        for node in self._parse(source).body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                yield from self._bound(node.body, "", False)

    def _bound(self, body: list[ast.stmt], module: str, package: bool) -> Iterator[str]:
        """Names that statements bind, functions' and classes' own bodies left out."""
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield node.name
                continue
            if isinstance(node, ast.Import):
                yield from (each.asname or each.name.partition(".")[0] for each in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from self._imported(node, module, package)
            else:
                yield from (
                    each.id
                    for each in _expressions(node)
                    if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
                )
            for _, value in ast.iter_fields(node):
                if isinstance(value, list) and value and isinstance(value[0], ast.stmt | ast.ExceptHandler):
                    inner = [
                        each
                        for part in value
                        for each in (part.body if isinstance(part, ast.ExceptHandler) else [part])
                    ]
                    yield from self._bound(inner, module, package)

    def _imported(self, node: ast.ImportFrom, module: str, package: bool) -> Iterator[str]:
        if node.names[0].name != "*":
            yield from (each.asname or each.name for each in node.names)
            return
        parts = module.split(".")
        base = parts[: len(parts) - node.level + package] if node.level else []
        source = ".".join([*base, *([node.module] if node.module else [])])
        if source.startswith("torch"):
            yield from (name for name in self.names(source) if not name.startswith("_"))


def _expressions(node: ast.stmt) -> Iterator[ast.AST]:
    """All of a statement but the statements inside of it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.stmt | ast.ExceptHandler):
            yield from ast.walk(child)


def grouped(releases: dict[str, dict[str, frozenset[str]]]) -> dict[str, dict[str, str]]:
    """By module and the releases that have them, "2.9 2.10", the names, in one string."""
    table: dict[str, dict[str, str]] = {}
    for module in sorted({module for tables in releases.values() for module in tables}):
        having: defaultdict[str, list[str]] = defaultdict(list)
        everything = {name for tables in releases.values() for name in tables.get(module, ())}
        for name in sorted(everything):
            have = [release for release, tables in releases.items() if name in tables.get(module, ())]
            having[" ".join(have)].append(name)
        table[module] = {key: " ".join(names) for key, names in sorted(having.items())}
    return table


def main(wheels: list[str]) -> None:
    releases: dict[str, dict[str, frozenset[str]]] = {}
    for path in map(Path, wheels):
        match = _WHEEL.match(path.name)
        if match is None:
            sys.exit(f"{path} is not a wheel of torch")
        releases[match[1]] = Wheel(path).tables()
    if not releases:
        sys.exit(__doc__)
    ordered = dict(sorted(releases.items(), key=lambda item: tuple(map(int, item[0].split(".")))))
    document = {"releases": list(ordered), "modules": grouped(ordered)}
    TABLE.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
