"""The CPUs that this process may use, their cores and their memory."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from catenary.cgroups import cpu_limit
from catenary.cpus.notation import parse_cpus

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
    """The node of each CPU."""
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
