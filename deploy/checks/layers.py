"""Check which package imports which, from the source alone.

Services share only `catenary`, which imports none of them (its command line and `catenary.llm` may). The pure
cores import neither torch nor grpc. Files stay short, and lines of C++, which no formatter here looks at.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
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
MAX_LINES = 350
MAX_COLUMNS = 110


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


def sizes(path: str, text: str) -> Iterator[str]:
    """Yield what of a file is too long."""
    if text.count("\n") > MAX_LINES:
        yield f"{path}: longer than {MAX_LINES} lines"
    if not path.endswith(".py"):
        for number, line in enumerate(text.splitlines(), 1):
            if len(line) > MAX_COLUMNS:
                yield f"{path}:{number}: longer than {MAX_COLUMNS} columns"


def main() -> list[str]:
    problems: list[str] = []
    for pattern in ("services/**/*.h", "services/**/*.cpp", "tests/native/*.cpp"):
        for file in sorted(ROOT.glob(pattern)):
            problems += sizes(file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8"))
    for package in ("catenary", "gateway", "services"):
        for file in sorted((ROOT / package).rglob("*.py")):
            path = file.relative_to(ROOT).as_posix()
            if path.startswith("catenary/v1/"):
                continue
            text = file.read_text(encoding="utf-8")
            for line, name in imports(ast.parse(text)):
                reason = forbidden(path, name)
                if reason is not None:
                    problems.append(f"{path}:{line}: {reason}: {name}")
            problems += sizes(path, text)
    return problems


if __name__ == "__main__":
    sys.exit("\n".join(main()) or 0)
