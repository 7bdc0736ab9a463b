"""Which engine computes on which CPUs, and which are left to the other services. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from catenary.cpus.notation import Binding
from catenary.cpus.topology import Topology

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

    Where cores are few (or a quota makes them fewer) engines share them with the services and nobody is
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
    """The services get the last cores of the node with the most to spare, time and again."""
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
    """CPUs of cores on which nobody computes."""
    return tuple(
        sorted(cpu for node in topology.cores for core in node if not taken & set(core) for cpu in core)
    )
