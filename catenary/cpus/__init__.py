"""Which CPUs a process computes on: the notation, the machine's shape, and who gets what."""

from __future__ import annotations

from catenary.cpus.notation import Binding, format_cpus, parse_binding, parse_cpus
from catenary.cpus.placement import EngineCpus, Placement, place
from catenary.cpus.topology import Topology, read_topology

__all__ = [
    "Binding",
    "EngineCpus",
    "Placement",
    "Topology",
    "format_cpus",
    "parse_binding",
    "parse_cpus",
    "place",
    "read_topology",
]
