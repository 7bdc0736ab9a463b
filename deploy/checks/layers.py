"""Check which package imports which, from the source alone.

Services share only `catenary`, which imports none of them (its command line and `catenary.llm` may). The pure
cores import neither torch nor grpc. Who is outside of a package takes what its `__init__` hands out. Files
stay short, and lines of C++, which no formatter here looks at.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("catenary", "gateway", "services")
SERVICES = ("gateway", "services.router", "services.tokenizer", "services.engine")
PURE = (
    "services/router/fleet",
    "services/router/placement",
    "services/router/admission",
    "services/engine/scheduler",
    "services/engine/kv",
    "services/engine/bucketing",
    "services/engine/tracing",
)
# The face of the first is for applications: services take its modules. That of the second is for those that
# have no torch: what needs torch is taken from its modules.
FACELESS = ("catenary", "services.engine.model")
MAX_LINES = 600
MAX_COLUMNS = 110
SOURCES = (".py", ".cpp", ".h")


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the absolute name of every import in a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            yield node.lineno, node.module


def inside(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def forbidden(path: str, name: str) -> str | None:
    """Return why the file may not import `name`, or None."""
    module = path.removesuffix(".py").replace("/", ".")
    owner = next((service for service in SERVICES if inside(module, service)), "catenary")
    other = next((service for service in SERVICES if inside(name, service)), None)
    if other is not None and other != owner:
        if owner != "catenary":
            return f"{owner} imports another service"
        if not path.startswith(("catenary/cli/", "catenary/llm/")):
            return "catenary imports a service"
    if name.split(".")[0] in ("torch", "grpc", "transformers") and path.startswith(PURE):
        return "a pure core imports a framework"
    return None


def faces() -> dict[str, list[str]]:
    """What packages say in `__all__` that is taken from them."""
    found: dict[str, list[str]] = {}
    for file in (file for package in PACKAGES for file in (ROOT / package).rglob("__init__.py")):
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
    return None if inside(module, package) else f"reaches behind the face of {package}"


def main() -> list[str]:
    problems: list[str] = []
    known = faces()
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            path = file.relative_to(ROOT).as_posix()
            if path.startswith("catenary/v1/"):
                continue
            for line, name in imports(ast.parse(file.read_text(encoding="utf-8"))):
                reason = forbidden(path, name) or behind(path, name, known)
                if reason is not None:
                    problems.append(f"{path}:{line}: {reason}: {name}")
    return problems + list(sizes())


def sizes() -> Iterator[str]:
    """Yield what of the sources is too long."""
    for package in (*PACKAGES, "benchmarks", "tests"):
        for file in sorted((ROOT / package).rglob("*")):
            path = file.relative_to(ROOT).as_posix()
            if file.suffix not in SOURCES or path.startswith("catenary/v1/"):
                continue
            lines = file.read_text(encoding="utf-8").splitlines()
            if len(lines) > MAX_LINES:
                yield f"{path}: longer than {MAX_LINES} lines"
            if file.suffix != ".py":
                for number, line in enumerate(lines, 1):
                    if len(line) > MAX_COLUMNS:
                        yield f"{path}:{number}: longer than {MAX_COLUMNS} columns"


if __name__ == "__main__":
    sys.exit("\n".join(main()) or 0)
