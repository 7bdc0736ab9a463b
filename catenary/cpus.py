"""Which CPUs a process computes on: the notation, the machine's topology, and the placement of engines."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from catenary.cgroups import cpu_limit

MAX_CPUS = 8192
_PART = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Binding:
    """The option as read. `lists`: CPUs of each engine in turn; without any, `auto` asks for a choice."""

    auto: bool = False
    lists: tuple[tuple[int, ...], ...] = ()


def parse_cpus(text: str) -> tuple[int, ...]:
    """Read `0-3,8`, rising and without doubles. Raises ValueError, one line."""
    cpus: set[int] = set()
    for part in text.split(","):
        found = _PART.fullmatch(part.strip())
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if not first <= last < MAX_CPUS:
            raise ValueError(f"{text[:40]!r} is no set of CPUs such as 0-3,8")
        cpus.update(range(first, last + 1))
    return tuple(sorted(cpus))


def format_cpus(cpus: Iterable[int]) -> str:
    """Return CPUs in the notation of `parse_cpus`, as short as possible."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and runs[-1][-1] == cpu - 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def parse_binding(text: str) -> Binding:
    """Read `auto`, `none` or lists that | parts, one for each engine. Raises ValueError, one line."""
    word = text.strip().lower()
    if word in ("auto", "none"):
        return Binding(auto=word == "auto")
    lists = tuple(parse_cpus(part) for part in word.split("|"))
    taken = [cpu for cpus in lists for cpu in cpus]
    if len(set(taken)) < len(taken):
        raise ValueError(f"{text[:40]!r} gives one CPU to two engines")
    return Binding(lists=lists)


_CPUS = Path("sys/devices/system/cpu")
_NODES = Path("sys/devices/system/node")


@dataclass(frozen=True, slots=True)
class Topology:
    """`cores`: by NUMA node, the CPUs of each core, those that share one together; nodes without one of these
    CPUs are left out. `limit`: CPUs that may be busy at once, which a container's quota can make fewer.
    """

    cores: tuple[tuple[tuple[int, ...], ...], ...]
    limit: int

    @property
    def count(self) -> int:
        """Cores."""
        return sum(map(len, self.cores))

    @property
    def cpus(self) -> int:
        """CPUs: with hyperthreads more than cores."""
        return sum(len(core) for node in self.cores for core in node)


def read_topology(allowed: Iterable[int] | None = None, root: Path = Path("/")) -> Topology:
    """Look at the machine; `allowed` None: the CPUs that this process may use.

    What the kernel does not say is taken to be one node, and a core for each CPU.
    """
    cpus = set(os.sched_getaffinity(0) if allowed is None else allowed)
    nodes = _nodes(root) or dict.fromkeys(cpus, 0)
    cores: dict[int, dict[tuple[int, ...], list[int]]] = {}
    for cpu in sorted(cpus):
        core = _siblings(root, cpu)
        cores.setdefault(nodes.get(cpu, 0), {}).setdefault(core, []).append(cpu)
    return Topology(
        tuple(tuple(tuple(core) for core in cores[node].values()) for node in sorted(cores)),
        _limit(root, len(cpus)),
    )


def _siblings(root: Path, cpu: int) -> tuple[int, ...]:
    try:
        text = (root / _CPUS / f"cpu{cpu}/topology/thread_siblings_list").read_text(encoding="ascii")
        return parse_cpus(text)
    except (OSError, ValueError):
        return (cpu,)


def _nodes(root: Path) -> Mapping[int, int]:
    """Return the node of each CPU."""
    found: dict[int, int] = {}
    for folder in (root / _NODES).glob("node[0-9]*"):
        try:
            cpus = parse_cpus((folder / "cpulist").read_text(encoding="ascii"))
        except (OSError, ValueError):  # a node of memory alone has no CPUs
            continue
        found |= dict.fromkeys(cpus, int(folder.name.removeprefix("node")))
    return found


def _limit(root: Path, cpus: int) -> int:
    quota = cpu_limit(root)
    return cpus if quota is None else max(1, min(cpus, int(quota)))


# From so many cores on one is kept for the services, and one more for each so many further ones.
FIRST_RESERVED = 8
NEXT_RESERVED = 16


@dataclass(frozen=True, slots=True)
class EngineCpus:
    """Of one engine: `threads` that compute, each on one of `cpus`; None: the kernel moves them about."""

    threads: int
    cpus: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """Of all engines in turn. `services`: CPUs of everything else, None: wherever there is room."""

    engines: tuple[EngineCpus, ...]
    services: tuple[int, ...] | None = None


def place(topology: Topology, engines: int, binding: Binding, reserve: int | None = None) -> Placement:
    """Give each engine its CPUs: one thread a core, each engine within one NUMA node.

    Where cores are few (or a quota makes them fewer) engines share them with the services and no process is
    bound. `reserve`: cores that each engine leaves to the services, None: by the number of cores. Raises
    ValueError, one line, for lists that do not fit the engines, or where nothing would be left of the cores.
    """
    if binding.lists:
        return _listed(binding.lists, engines, topology)
    cores = min(topology.count, topology.limit)
    kept = reserve * engines if reserve is not None else _reserved(cores, engines)
    if kept > max(cores - engines, 0):
        raise ValueError(f"{kept} of {cores} cores cannot be kept free beside {engines} engines")
    if not binding.auto or topology.limit < topology.cpus or not kept:
        share = max((cores - kept) // engines, 1)
        return Placement((EngineCpus(share),) * engines)
    return _bound(topology, engines, kept)


def _reserved(cores: int, engines: int) -> int:
    if cores < max(FIRST_RESERVED, 2 * engines):
        return 0
    return 1 + (cores - FIRST_RESERVED) // NEXT_RESERVED


def _listed(lists: Sequence[tuple[int, ...]], engines: int, topology: Topology) -> Placement:
    if len(lists) != engines:
        raise ValueError(f"{len(lists)} lists of CPUs for {engines} engines: | parts them")
    allowed = {cpu for node in topology.cores for core in node for cpu in core}
    taken = {cpu for cpus in lists for cpu in cpus}
    if missing := sorted(taken - allowed):
        raise ValueError(f"CPU {missing[0]} is not among those that this process may use")
    free = _free(topology, taken)
    return Placement(tuple(EngineCpus(len(cpus), cpus) for cpus in lists), free or None)


def _bound(topology: Topology, engines: int, kept: int) -> Placement:
    """Bind engines; the services get the last cores of the node with the most to spare, time and again."""
    nodes = [list(node) for node in topology.cores]
    homes: list[int] = []
    for _ in range(engines):
        # Where it would have most cores to itself.
        homes.append(
            max(range(len(nodes)), key=lambda node: (len(nodes[node]) / (homes.count(node) + 1), -node))
        )
    for _ in range(kept):
        spare = {node: len(nodes[node]) - homes.count(node) for node in range(len(nodes))}
        # A node without an engine gives first.
        giver = max(spare, key=lambda node: (node not in homes, spare[node], node))
        if spare[giver] > 0:
            nodes[giver].pop()
    placed: list[EngineCpus] = []
    for index, home in enumerate(homes):
        first, count = homes[:index].count(home), homes.count(home)
        mine = nodes[home][first * len(nodes[home]) // count : (first + 1) * len(nodes[home]) // count]
        cpus = tuple(core[0] for core in mine)
        placed.append(EngineCpus(len(cpus), cpus))
    return Placement(tuple(placed), _free(topology, {cpu for one in placed for cpu in one.cpus or ()}))


def _free(topology: Topology, taken: set[int]) -> tuple[int, ...]:
    """Return the CPUs of cores on which no engine computes."""
    return tuple(
        sorted(cpu for node in topology.cores for core in node if not taken & set(core) for cpu in core)
    )
