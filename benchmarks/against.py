"""Two working trees measured in turn: what `python -m benchmarks.smoke --against REV` does.

The one is this working tree, the other a revision, checked out into a temporary folder. Each starts through
its own entry point (`[project.scripts]`) and its own benchmarks, with its folder on PYTHONPATH, so that the
packages of the two may have different names. Both are measured `--repeats` times, one right after the other,
and the first of a repeat alternates. Of each figure the ratio is taken repeat by repeat; more than 1 is
better than before. A ratio holds if its median is at least 0.97, or if its spread, from least to most,
includes 1.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from benchmarks.peers import FIRST_TOKEN, OWN, Lengths, Measuring, PeerError, Sample, table
from benchmarks.peers.server import Server, free_ports, interrupted_by_signals, make_model
from benchmarks.peers.subjects import Model, Place, clean_environment, subject

HERE = Path(__file__).resolve().parents[1]
PARTS = ("start", "model", "hops")
"""What can be measured: starts of `catenary up`, requests to it, and what its services add to a request."""
LEAST = 0.97
STREAMS = (1, 8)
_LENGTHS = Lengths(prompt_tokens=64, output_tokens=64, words=400, prompts=2)
_TIMEOUT_S = 120.0
# Of the hops: streams and tokens are the defaults of benchmarks.added_latency.
_HOPS = ("--rounds", "1", "--requests", "4")
_PACKAGES = ("catenary", "gateway", "services.engine")

Tell = Callable[[str], None]
Item = TypeVar("Item")
Figures = dict[str, list[float]]
"""Values by the figure's name, one of each repeat."""


@dataclass(frozen=True, slots=True)
class Tree:
    """A working tree, and what it is called in tables."""

    name: str
    root: Path

    @property
    def command(self) -> tuple[str, ...]:
        """`catenary` of this tree. Raises PeerError."""
        try:
            scripts = tomllib.loads((self.root / "pyproject.toml").read_text())["project"]["scripts"]
            module, _, _ = str(scripts["catenary"]).partition(":")
        except (OSError, KeyError, tomllib.TOMLDecodeError) as error:
            raise PeerError(f"{self.root} has no entry point `catenary`: {error}") from None
        return (sys.executable, "-m", module)

    @property
    def environment(self) -> dict[str, str]:
        """The environment of its processes, without settings of anybody's own."""
        return {**clean_environment(), "PYTHONPATH": str(self.root)}

    def check(self) -> None:
        """Raise PeerError if its processes would import another tree's packages."""
        code = "import importlib; print(*[importlib.import_module(n).__file__ for n in {!r}], sep='\\n')"
        told = self.run((sys.executable, "-c", code.format(_PACKAGES)))
        astray = [line for line in told.splitlines() if not Path(line).is_relative_to(self.root)]
        if astray:
            raise PeerError(f"processes of {self.root} import {', '.join(astray)}")

    def run(self, command: Sequence[str]) -> str:
        """Run a command in the tree; return what it prints. Raises PeerError."""
        done = subprocess.run(
            command,
            cwd=self.root,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        if done.returncode:
            raise PeerError(f"{' '.join(command)} in {self.root}: {done.stderr.strip()[-600:]}")
        return done.stdout


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times as good a figure is as before, over the repeats.

    A difference of two times can be measured as nothing or less, which has no ratio: such a repeat is left
    out, and if it is half of them, the figure counts as not measured.
    """

    name: str
    before: float
    after: float
    ratios: tuple[float, ...]
    repeats: int

    @property
    def measured(self) -> bool:
        """Whether more than half of the repeats have a ratio."""
        return 2 * len(self.ratios) > self.repeats

    @property
    def median(self) -> float:
        """The median of the ratios."""
        return statistics.median(self.ratios)

    @property
    def holds(self) -> bool:
        """Whether it was measured, and nothing shows that it has become worse."""
        return self.measured and (self.median >= LEAST or min(self.ratios) <= 1 <= max(self.ratios))

    def cells(self) -> list[str]:
        """Return a row of the table."""
        if not self.measured:
            return [self.name, f"{self.before:.4g}", f"{self.after:.4g}", "-", "-", "NOT MEASURED"]
        spread = f"{min(self.ratios):.3f} to {max(self.ratios):.3f}"
        told = "holds" if self.holds else "WORSE"
        return [self.name, f"{self.before:.4g}", f"{self.after:.4g}", f"{self.median:.3f}", spread, told]


def run(revision: str, repeats: int, parts: Sequence[str], tell: Tell) -> int:
    """Measure both trees and print the table; return 1 if a ratio does not hold. Raises PeerError."""
    with checkout(revision) as other, tempfile.TemporaryDirectory() as empty, interrupted_by_signals():
        trees = (Tree("before", other), Tree("after", HERE))
        for tree in trees:
            tree.check()
        found: dict[str, Figures] = {tree.name: defaultdict(list) for tree in trees}
        # Servers would take modules from the folder in which they start.
        os.chdir(empty)
        if "start" in parts or "model" in parts:
            measure_servers(trees, found, repeats, parts, tell)
        if "hops" in parts:
            measure_hops(trees, found, repeats, tell)
    load = os.getloadavg()[0]
    if load > len(os.sched_getaffinity(0)) + 1.5:
        tell(f"warning: the load of this machine is {load:.1f}: wall times have suffered, CPU times less")
    ratios = ratios_of(found["before"], found["after"])
    head = ["", f"{revision}, median", "this tree, median", "times as good", "least to most", ""]
    print("\n".join(table([head, *(ratio.cells() for ratio in ratios)])))
    return int(not all(ratio.holds for ratio in ratios))


@contextmanager
def checkout(revision: str) -> Iterator[Path]:
    """Give a worktree of a revision in a temporary folder, and remove it. Raises PeerError."""
    with tempfile.TemporaryDirectory(prefix="cat-", ignore_cleanup_errors=True) as directory:
        root = Path(directory, "before")
        _git("worktree", "add", "--detach", "--quiet", str(root), revision)
        try:
            yield root.resolve()
        finally:
            _git("worktree", "remove", "--force", str(root))


def measure_servers(
    trees: Sequence[Tree], found: Mapping[str, Figures], repeats: int, parts: Sequence[str], tell: Tell
) -> None:
    """Start both trees' `catenary up`, as often as there are repeats, and ask the last ones."""
    model = make_model("smollm2", tell)
    with ExitStack() as ending:
        servers = [
            _server(tree, model, port) for tree, port in zip(trees, free_ports(len(trees)), strict=True)
        ]
        for server in servers:
            ending.callback(server.stop)
            tell(f"{server.subject.name}: first start, not counted: {server.start(_TIMEOUT_S):.1f} s")
            server.stop()
        for repeat in range(repeats if "start" in parts else 0):
            for server in turned(servers, repeat):
                seconds = server.start(_TIMEOUT_S)
                tell(f"#{repeat + 1} {server.subject.name}: {seconds:.1f} s to its first answer")
                found[server.subject.name]["start, s"].append(seconds)
                server.stop()
        if "model" not in parts:
            return
        for server in servers:
            server.start(_TIMEOUT_S)
        measuring = Measuring(servers, model.directory, _LENGTHS)
        measuring.warm_up(STREAMS, tell)
        for sample in measuring.all_runs(STREAMS, repeats, tell):
            for name, value in figures_of(sample):
                found[sample.subject][name].append(value)


def figures_of(sample: Sample) -> Iterator[tuple[str, float]]:
    """Yield what a run says: a rate and CPU a token, or the time to a first token."""
    if sample.streams == FIRST_TOKEN:
        yield "first token of 400 words, ms", sample.value
        return
    streams = f"{sample.streams} stream{'s' if sample.streams > 1 else ''}"
    yield f"{streams}, tokens/s", sample.value
    tokens = max(2, sample.streams) * _LENGTHS.output_tokens
    yield f"{streams}, CPU a token, ms", 1e3 * sample.cpu_s / tokens


def measure_hops(trees: Sequence[Tree], found: Mapping[str, Figures], repeats: int, tell: Tell) -> None:
    """Run each tree's own benchmarks.added_latency, with a scripted engine."""
    for repeat in range(repeats):
        for tree in turned(trees, repeat):
            told = tree.run((sys.executable, "-m", "benchmarks.added_latency", *_HOPS))
            read = hops_of(told)
            tell(f"#{repeat + 1} {tree.name}: " + ", ".join(f"{name} {read[name]:g}" for name in read))
            for name, value in read.items():
                found[tree.name][name].append(value)


def hops_of(told: str) -> dict[str, float]:
    """Read the figures from what benchmarks.added_latency prints. Raises PeerError."""
    found: dict[str, float] = {}
    for name in ("first", "last"):
        row = re.search(rf"^\| to the {name} token \|(?:[^|]+\|){{3}} (-?[\d.]+) \|", told, re.MULTILINE)
        if row is not None:
            found[f"added to the {name} token, ms"] = float(row[1])
    cpu = re.search(r"^CPU of a request, ms, .*?: (.*)$", told, re.MULTILINE)
    if cpu is None or len(found) != 2:
        raise PeerError(f"benchmarks.added_latency printed something else: {told[-600:]!r}")
    spent: dict[str, float] = defaultdict(float)
    for part in cpu[1].split(", "):
        name, _, value = part.rpartition(" ")
        if name != "this client":
            spent[name.removesuffix("'s worker")] += float(value)
    found |= {f"CPU of a request, {name}, ms": value for name, value in spent.items()}
    found["CPU of a request, all services, ms"] = sum(spent.values())
    return found


def ratios_of(before: Mapping[str, Sequence[float]], after: Mapping[str, Sequence[float]]) -> list[Ratio]:
    """Compare figures that both trees have, repeat by repeat."""
    ratios: list[Ratio] = []
    for name in (name for name in before if name in after):
        pairs = list(zip(before[name], after[name], strict=True))
        more_is_better = name.endswith("tokens/s")
        each = tuple(new / old if more_is_better else old / new for old, new in pairs if old > 0 and new > 0)
        old, new = statistics.median(before[name]), statistics.median(after[name])
        ratios.append(Ratio(name, old, new, each, len(pairs)))
    return ratios


def turned(items: Sequence[Item], repeat: int) -> list[Item]:
    """Return the items in this repeat's order."""
    first = repeat % len(items)
    return [*items[first:], *items[:first]]


def _server(tree: Tree, model: Model, port: int) -> Server:
    cpus = tuple(sorted(os.sched_getaffinity(0)))
    made = subject(OWN, model, Place(Path(), Path(), cpus, port))
    arguments = made.command[list(made.command).index("up") :]
    own = {**made.environment, "PYTHONPATH": str(tree.root)}
    mine = replace(made, name=tree.name, command=[*tree.command, *arguments], environment=own)
    log = Path(tempfile.gettempdir()) / f"smoke-{tree.name}-{port}.log"
    return Server(mine, f"http://127.0.0.1:{port}", log)


def _git(*arguments: str) -> None:
    done = subprocess.run(("git", *arguments), cwd=HERE, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PeerError(f"git {' '.join(arguments)}: {done.stderr.strip()}")
