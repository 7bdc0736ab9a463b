"""Count the source: files, lines, folders, import circles, small modules; and compare with another revision.

    python deploy/checks/house.py                  # this working tree
    python deploy/checks/house.py --rev REV        # a revision, as git has it
    python deploy/checks/house.py --against REV    # both, with ratios and the aims
    python deploy/checks/house.py --json
    python deploy/checks/house.py chat             # files that a chat crosses (see chat_files.py)

Counted are the Python files of `catenary`, `catenary_apps`, `services` and `gateway`, without the stubs that
protoc writes. The doubles for tests (`catenary_testing`, and `services/engine/scripted`, where its scripted
engine was before) are counted apart in every tree, so that a move there saves nothing.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import chat_files
import laws
from import_graph import RUN, ImportGraph, Module, circles

PRODUCT = ("catenary", "catenary_apps", "services", "gateway")
TESTING = ("catenary_testing/", "services/engine/scripted/")
# What is measured against the first commit of the rebuilding, and what a tree must reach: at most, or within.
AIMS: dict[str, str] = {
    "files": "ratio <= 0.63, aim 0.53",
    "lines": "ratio <= 0.93",
    "median": "130 to 180",
    "p90": "< 420",
    "max": "<= 600",
    "folders": "about 50",
    "circles": "0",
    "circle_modules": "0",
    "face_circles": "0",
    "small": "0, or a reason each",
}


@dataclass(frozen=True)
class Counts:
    """Figures of a tree. Circles are lists of module names."""

    files: int
    lines: int
    median: float
    p90: float
    max: int
    folders: int
    faces: int
    under_60: int
    small: int
    run_circles: list[list[str]]
    """By imports that run as their module is imported, faces aside."""
    all_circles: list[list[str]]
    """By those, the ones in functions and the ones for type checkers."""
    face_circles: list[list[str]]
    """Further ones, that go through a package's face."""
    package_circles: list[list[str]]
    """Of packages below one parent, each with all that is in it."""
    testing_files: int
    testing_lines: int

    def figures(self) -> dict[str, float]:
        """Numbers by name, circles as their number."""
        found: dict[str, float] = {
            name: value
            for name, value in asdict(self).items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        return found | {
            "run_circles": len(self.run_circles),
            "circles": len(self.all_circles),
            "circle_modules": sum(map(len, self.all_circles)),
            "face_circles": len(self.face_circles),
            "face_circle_modules": sum(map(len, self.face_circles)),
            "package_circles": len(self.package_circles),
        }


def count(root: Path) -> Counts:
    """Count the tree at `root`. Raises ValueError if it has no source of ours."""
    graph = ImportGraph(root, laws.PACKAGES)
    product = [module for module in graph.modules.values() if _is_product(module)]
    testing = [module for module in graph.modules.values() if not _is_product(module)]
    if not product:
        raise ValueError(f"{root} has none of {', '.join(PRODUCT)}")
    lines = [module.lines for module in product]
    plain = circles(graph.targets(lambda edge: not edge.face))
    return Counts(
        files=len(product),
        lines=sum(lines),
        median=statistics.median(lines),
        p90=round(percentile(lines, 90), 1),
        max=max(lines),
        folders=len({module.path.rpartition("/")[0] for module in product}),
        faces=sum(module.is_face for module in product),
        under_60=sum(one < laws.SMALL_LINES for one in lines),
        small=sum(1 for one in laws.small(graph) if not one.file.startswith(TESTING)),
        run_circles=circles(graph.targets(lambda edge: edge.kind == RUN and not edge.face)),
        all_circles=plain,
        face_circles=[circle for circle in laws.all_circles(graph) if circle not in plain],
        package_circles=circles_of_packages(graph),
        testing_files=len(testing),
        testing_lines=sum(module.lines for module in testing),
    )


def circles_of_packages(graph: ImportGraph) -> list[list[str]]:
    """Return the circles among packages that have one parent, each taken with all its modules."""
    found: list[list[str]] = []
    packages = {name for name, module in graph.modules.items() if module.is_face}
    for parent in sorted({name.rpartition(".")[0] for name in packages}):
        targets: dict[str, set[str]] = {
            name: set() for name in packages if name.rpartition(".")[0] == parent and name
        }
        depth = parent.count(".") + 2 if parent else 1
        for edge in graph.edges:
            source, target = (".".join(name.split(".")[:depth]) for name in (edge.source, edge.target))
            counted = not edge.face and not laws.is_lazy(edge) and source != target
            if counted and source in targets and target in targets:
                targets[source].add(target)
        found += circles(targets)
    return found


def percentile(values: Sequence[int], percent: int) -> float:
    """Return a percentile, between two values where it falls between them."""
    if len(values) == 1:
        return float(values[0])
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def _is_product(module: Module) -> bool:
    return not module.path.startswith(TESTING)


@contextmanager
def tree_of(revision: str, root: Path = laws.ROOT) -> Iterator[Path]:
    """Give a temporary directory with the files of a revision. Raises CalledProcessError."""
    told = subprocess.run(
        ("git", "archive", "--format=tar", revision), cwd=root, capture_output=True, check=True
    )
    with tempfile.TemporaryDirectory(prefix="house-") as directory:
        with tarfile.open(fileobj=io.BytesIO(told.stdout)) as packed:
            packed.extractall(directory, filter="data")
        yield Path(directory)


def table(rows: Iterable[Sequence[str]]) -> list[str]:
    """Lay out rows as aligned columns, the first to the left."""
    rows = [*rows]
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) if not place else cell.rjust(width) for place, (cell, width) in parts)
        for parts in (list(enumerate(zip(row, widths, strict=True))) for row in rows)
    ]


def compared(before: Counts, after: Counts) -> list[str]:
    """Return the table of two trees: figure, before, after, ratio, aim."""
    rows = [("", "before", "after", "ratio", "aim")]
    now = after.figures()
    for name, then in before.figures().items():
        if name not in now:
            continue
        ratio = f"{now[name] / then:.3f}" if then else "-"
        rows.append((name, f"{then:g}", f"{now[name]:g}", ratio, AIMS.get(name, "")))
    return table(rows)


def described(counts: Counts) -> list[str]:
    """Return the table of one tree, and the members of its circles."""
    rows = [(name, f"{value:g}", AIMS.get(name, "")) for name, value in counts.figures().items()]
    lines = table([("", "now", "aim"), *rows])
    kinds = {
        "circle": counts.all_circles,
        "circle through a face": counts.face_circles,
        "circle of packages": counts.package_circles,
    }
    for kind, found in kinds.items():
        lines += [f"{kind} of {len(circle)}: {', '.join(circle)}" for circle in found]
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=("source", "chat"), default="source")
    parser.add_argument("--rev", help="count this revision instead of the working tree")
    parser.add_argument("--against", metavar="REV", help="count REV first, and print ratios to it")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    revisions = [options.rev] if options.against is None else [options.against, options.rev]
    if options.what == "chat":
        print("\n".join(_told(_each(revisions, chat_files.count), chat_files, as_json=options.json)))
    else:
        print("\n".join(_told(_each(revisions, count), sys.modules[__name__], as_json=options.json)))
    return 0


def _each(revisions: Sequence[str | None], counting: Callable[[Path], Any]) -> list[Any]:
    found: list[Any] = []
    for revision in revisions:
        with nullcontext(laws.ROOT) if revision is None else tree_of(revision) as directory:
            found.append(counting(directory))
    return found


def _told(found: list[Any], layout: Any, *, as_json: bool) -> list[str]:
    """Lay out the counts of one or two trees with `described` or `compared` of a module."""
    if not as_json:
        return list(layout.compared(*found) if len(found) == 2 else layout.described(*found))
    told = [asdict(one) for one in found]
    return [json.dumps(told[0] if len(told) == 1 else {"before": told[0], "after": told[1]}, indent=1)]


if __name__ == "__main__":
    sys.exit(main())
