"""Check the laws of the house, from the source alone, with a list of known violations that may only shrink.

    python deploy/checks/laws.py               # print violations not listed, and stale rows
    python deploy/checks/laws.py --prune       # drop stale rows
    python deploy/checks/laws.py --follow REV  # rename the list's files as git renamed them since REV
    python deploy/checks/laws.py --add LAW FILE REASON

The laws:

circle    No import circle. Imports inside functions and for type checkers count, and so do circles through a
          package's face (`__init__`), but for those through the one lazy import upward (`LAZY`).
layer     `TABLE` says which group of packages may import which. It is closed (whatever a group may import
          imports nothing that the group may not), so the law holds over chains of imports too.
pure-...  The pure cores (`PURE`) reach none of `IMPURE` through any chain of our own modules.
small     No module under 60 lines that one module of its own folder alone imports.
long      No file over 600 lines.
citation  No cited document that is not in the repository.
caption   No docstring that begins with a pronoun or a question word in place of a verb or a noun, and none
          that only repeats the name.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from import_graph import TYPING, Edge, ImportGraph, chain_to, chains, circles, is_generated

ROOT = Path(__file__).resolve().parents[2]
VIOLATIONS = Path(__file__).with_name("violations.toml")
PACKAGES = ("catenary", "catenary_apps", "catenary_testing", "gateway", "services")
SOURCES = (*PACKAGES, "benchmarks", "deploy", "docs", "examples", "tests")

# Groups by the prefixes of their modules; the longest prefix that fits decides.
GROUPS = {
    "catenary": ("catenary",),
    "router": ("services.router",),
    "tokenizer": ("services.tokenizer",),
    "engine": ("services.engine",),
    "gateway": ("gateway",),
    "apps": ("catenary_apps",),
    "testing": ("catenary_testing",),
}
SERVICES = ("router", "tokenizer", "engine", "gateway")
# Which group may import which besides itself.
TABLE: Mapping[str, tuple[str, ...]] = {
    "catenary": (),
    **dict.fromkeys(SERVICES, ("catenary",)),
    "apps": ("catenary", *SERVICES),
    "testing": ("catenary", *SERVICES, "apps"),
}
# `from catenary import LLM` imports upward, when the name is asked for: importer and imported module.
LAZY = {("catenary", "catenary_apps.llm")}

PURE = (
    "catenary.resume",
    "services.engine.bucketing",
    "services.engine.kv",
    "services.engine.learning",
    "services.engine.scheduler",
    "services.engine.tracing",
    "services.router.admission",
    "services.router.fleet",
    "services.router.placement",
)
IMPURE = ("asyncio", "grpc", "socket", "ssl", "torch", "transformers", "uvloop")

SMALL_LINES = 60
MAX_LINES = 600
LONG_SUFFIXES = (".py", ".cpp", ".h")

# First words of docstrings that leave open what is spoken of.
_VAGUE = re.compile(
    r"(?:what|who|whom|whose|whoever|whatever|where|it|they|that|those|these|nobody|somebody|everybody|something)"
    r"\b",
    re.IGNORECASE,
)
_FILLERS = re.compile(r"(?:an?|and|as|for|get|in|is|its?|of|on|or|return|see|set|the|this|to)")

_CITING = (".cpp", ".h", ".md", ".proto", ".py", ".sh", ".toml", ".yaml", ".yml")
_BARE = re.compile(r"(?<![\w/-])facts\s+\d+(?:\.\d+)*", re.IGNORECASE)
_DOCUMENT = re.compile(r"(?<![\w/.:-])(?:[\w.-]+/)*[\w-]+\.md\b")


@dataclass(frozen=True, order=True, slots=True)
class Violation:
    """A file that breaks a law; `detail` says how, and is no part of what is compared."""

    law: str
    file: str
    detail: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """What the list holds of it."""
        return self.law, self.file


def find_violations(root: Path = ROOT, graph: ImportGraph | None = None) -> list[Violation]:
    """Return what breaks a law in the tree at `root`, one for each file and law, sorted."""
    graph = graph or ImportGraph(root, PACKAGES)
    found: dict[tuple[str, str], Violation] = {}
    laws = (
        circular(graph),
        layered(graph),
        pure(graph),
        small(graph),
        long(root),
        citations(root),
        captions(graph),
    )
    for violation in (one for law in laws for one in law):
        found.setdefault(violation.key, violation)
    return sorted(found.values())


def group_of(module: str) -> str | None:
    """Return the group of a module, or None for a package that holds groups (`services`)."""
    fitting = [
        (len(prefix), group)
        for group, prefixes in GROUPS.items()
        for prefix in prefixes
        if inside(module, prefix)
    ]
    return max(fitting)[1] if fitting else None


def is_lazy(edge: Edge) -> bool:
    """Whether an edge is the lazy import upward."""
    return (edge.source, edge.target) in LAZY


def all_circles(graph: ImportGraph) -> list[list[str]]:
    """Return the circles of modules over every import; those through faces too, where they join no others."""
    plain = circles(graph.targets(lambda edge: not edge.face))
    known = {name for circle in plain for name in circle}
    through_faces = circles(graph.targets(lambda edge: not is_lazy(edge)))
    return plain + [circle for circle in through_faces if not known.issuperset(circle)]


def circular(graph: ImportGraph) -> Iterator[Violation]:
    """Yield each module of each circle, with a shortest way back to itself."""
    for circle in all_circles(graph):
        members = set(circle)
        inner = {
            name: targets & members
            for name, targets in graph.targets(lambda edge: True).items()
            if name in members
        }
        for name in circle:
            yield Violation("circle", graph.modules[name].path, " -> ".join(_way_back(inner, name)))


def _way_back(targets: Mapping[str, set[str]], name: str) -> list[str]:
    ways = [[*chain_to(chains(targets, first), name)] for first in sorted(targets[name])]
    return [name, *min(ways, key=len)]


def layered(graph: ImportGraph) -> Iterator[Violation]:
    """Yield the modules that import of a group that theirs may not."""
    for edge in graph.edges:
        if edge.face or is_lazy(edge):
            continue
        source, target = group_of(edge.source), group_of(edge.target)
        if source is None or target in (None, source, *TABLE[source]):
            continue
        path = graph.modules[edge.source].path
        yield Violation("layer", path, f"{source} imports {target}: {edge.target} in line {edge.line}")


def pure(graph: ImportGraph) -> Iterator[Violation]:
    """Yield the modules of pure cores that reach what they may not, with the chain of modules."""
    targets = graph.targets(lambda edge: edge.kind != TYPING and not is_lazy(edge))
    impure = {name: sorted(_impurities(graph, name)) for name in graph.modules}
    for name, module in graph.modules.items():
        if not any(inside(name, core) for core in PURE):
            continue
        before = chains(targets, name)
        reached: dict[str, str] = {}
        for other in before:
            for foreign in impure[other]:
                reached.setdefault(foreign, other)
        for foreign, last in reached.items():
            chain = " -> ".join([*chain_to(before, last), foreign])
            yield Violation(f"pure-{foreign}", module.path, chain)


def _impurities(graph: ImportGraph, name: str) -> Iterator[str]:
    for foreign in graph.foreign_of(name):
        top = "grpc" if foreign.endswith("_pb2_grpc") else foreign.partition(".")[0]
        top = "grpc" if top.startswith("grpc") else top
        if top in IMPURE:
            yield top


def small(graph: ImportGraph) -> Iterator[Violation]:
    """Yield the modules that are too small to stand alone: short, and read by one neighbour."""
    readers: dict[str, set[str]] = defaultdict(set)
    for edge in graph.edges:
        if not edge.face and edge.source != edge.target:
            readers[edge.target].add(edge.source)
    for name, module in graph.modules.items():
        if module.is_face or name.endswith("__main__") or module.lines >= SMALL_LINES:
            continue
        if len(readers[name]) != 1:
            continue
        (reader,) = readers[name]
        neighbours = reader.rpartition(".")[0] == name.rpartition(".")[0]
        if neighbours and not graph.modules[reader].is_face:
            yield Violation("small", module.path, f"{module.lines} lines, which {reader} alone imports")


def long(root: Path) -> Iterator[Violation]:
    """Yield the files with too many lines."""
    for file, path in _files(root, LONG_SUFFIXES):
        count = len(file.read_text(encoding="utf-8").splitlines())
        if count > MAX_LINES and not is_generated(path):
            yield Violation("long", path, f"{count} lines, of at most {MAX_LINES}")


def citations(root: Path) -> Iterator[Violation]:
    """Yield the files that cite a document which is not in the repository."""
    documents = {file.relative_to(root).as_posix() for file in _documents(root)}
    known = {path.split("/", part)[-1] for path in documents for part in range(path.count("/") + 1)}
    for file, path in [*_files(root, _CITING), *((one, one.name) for one in sorted(root.glob("*.md")))]:
        if path.startswith("tests/unit/deploy/"):
            continue  # Tests of this law.
        text = file.read_text(encoding="utf-8")
        cited = {match.group() for match in _DOCUMENT.finditer(text)}
        missing = sorted(one for one in cited if not _stands(one, path, known))
        missing += sorted({" ".join(match.split()) for match in _BARE.findall(text)})
        if missing:
            yield Violation("citation", path, ", ".join(missing))


def captions(graph: ImportGraph) -> Iterator[Violation]:
    """Yield the modules with docstrings that say nothing, or do not say of what."""
    for module in graph.modules.values():
        if is_generated(module.path):
            continue
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            text = ast.get_docstring(node) or ""
            name = "" if isinstance(node, ast.Module) else node.name
            if _VAGUE.match(text) or (text and name and _repeats(name, text)):
                line = 1 if isinstance(node, ast.Module) else node.lineno
                yield Violation("caption", module.path, f"line {line}: {text.splitlines()[0]}")


def _repeats(name: str, text: str) -> bool:
    told = {
        word.rstrip("s") for word in re.findall(r"[a-z0-9]+", text.lower()) if not _FILLERS.fullmatch(word)
    }
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name).lower()
    return told <= {word.rstrip("s") for word in re.findall(r"[a-z0-9]+", spaced)}


def _stands(cited: str, path: str, known: set[str]) -> bool:
    folder = path.rpartition("/")[0]
    relative = Path(folder, cited)
    parts: list[str] = []
    for part in relative.parts:
        if part == "..":
            parts = parts[:-1]
        elif part != ".":
            parts.append(part)
    return cited.removeprefix("./") in known or "/".join(parts) in known


def _documents(root: Path) -> Iterator[Path]:
    for folder in (*SOURCES, "changelog.d", "protos", "requirements"):
        yield from (root / folder).rglob("*.md")
    yield from root.glob("*.md")


def _files(root: Path, suffixes: tuple[str, ...]) -> Iterator[tuple[Path, str]]:
    for folder in (*SOURCES, "protos"):
        for file in sorted((root / folder).rglob("*")):
            if file.suffix in suffixes and file.is_file():
                yield file, file.relative_to(root).as_posix()


def inside(name: str, package: str) -> bool:
    """Whether a module is a package or is in it."""
    return name == package or name.startswith(package + ".")


# ----- The list


def read_list(file: Path = VIOLATIONS) -> dict[tuple[str, str], str]:
    """Return the listed violations with their reasons."""
    read = tomllib.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return {(law, path): reason for law, listed in read.items() for path, reason in listed.items()}


def write_list(listed: Mapping[tuple[str, str], str], file: Path = VIOLATIONS) -> None:
    """Write the list, sorted, a table for each law."""
    lines = [
        "# Files that break a law of deploy/checks/laws.py, by law, and why they may. The list only shrinks:",
        "# a mended file must be dropped (laws.py --prune), a moved one renamed (laws.py --follow REV).",
    ]
    for law in sorted({law for law, _ in listed}):
        lines += ["", f"[{law}]"]
        rows = [(path, reason) for (one, path), reason in sorted(listed.items()) if one == law]
        # A string of JSON is one of TOML too.
        lines += [f"{json.dumps(path)} = {json.dumps(reason, ensure_ascii=False)}" for path, reason in rows]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def problems(root: Path = ROOT, file: Path = VIOLATIONS, graph: ImportGraph | None = None) -> list[str]:
    """Return a line for each violation that is not listed, and for each listed one that is none."""
    found = {violation.key: violation for violation in find_violations(root, graph)}
    listed = read_list(file)
    lines = [
        f"{one.file}: {one.law}: {one.detail}" for key, one in sorted(found.items()) if key not in listed
    ]
    lines += [
        f"{path}: {law}: listed in {file.name}, and mended or gone: run deploy/checks/laws.py --prune"
        for law, path in sorted(listed)
        if (law, path) not in found
    ]
    return lines + [
        f"{path}: {law}: listed in {file.name} without a reason"
        for (law, path), reason in sorted(listed.items())
        if not reason.strip()
    ]


def followed(listed: Mapping[tuple[str, str], str], renamed: Mapping[str, str]) -> dict[tuple[str, str], str]:
    """Return the list with the names that files have now."""
    return {(law, renamed.get(path, path)): reason for (law, path), reason in listed.items()}


def renamed_since(revision: str, root: Path = ROOT) -> dict[str, str]:
    """Return the new names, by the old ones, of tracked files that were renamed since a revision."""
    command = ("git", "diff", "--find-renames=40%", "--name-status", "--diff-filter=R", "-z", revision)
    told = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    fields = told.split("\0")[:-1]
    return dict(zip(fields[1::3], fields[2::3], strict=True))


def main(arguments: Iterable[str] | None = None) -> int:
    """Run the command line; return 1 if a law is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--prune", action="store_true", help="drop what is mended from the list")
    action.add_argument("--follow", metavar="REV", help="rename the list's files as git did since REV")
    action.add_argument("--add", nargs=3, metavar=("LAW", "FILE", "REASON"), help="list a violation")
    options = parser.parse_args(None if arguments is None else list(arguments))
    listed = read_list()
    if options.add:
        law, path, reason = options.add
        write_list({**listed, (law, path): reason})
    elif options.follow:
        write_list(followed(listed, renamed_since(options.follow)))
    elif options.prune:
        found = {violation.key for violation in find_violations()}
        write_list({key: reason for key, reason in listed.items() if key in found})
    lines = problems()
    print("\n".join(lines), end="\n" if lines else "")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
