"""Which CPUs the engines of a deployment compute on, and what a machine has room for beside them."""

from __future__ import annotations

from collections.abc import Mapping

from catenary.cli.up.config import UpConfig
from catenary.cpus import Binding, Placement, Topology, format_cpus, parse_binding, place
from catenary.runtime import StartRefused

BIND_ENV = "CATENARY_ENGINE_CPU_BIND"
THREADS_ENV = "CATENARY_ENGINE_DEVICE_THREADS"
CORES_FOR_TWO_TOKENIZERS = 8


def cpus_of(config: UpConfig, topology: Topology, environment: Mapping[str, str]) -> Placement | None:
    """Return who computes where, None if no engine does so on a CPU. Raises StartRefused."""
    if config.device not in ("cpu", "sim"):
        return None
    binding = parse_binding(config.cpu_bind)
    if config.device == "sim" or (
        binding.auto and any(environment.get(name) for name in (BIND_ENV, THREADS_ENV))
    ):
        # What was said to the engines themselves is theirs to do.
        binding = Binding()
    try:
        return place(topology, config.engines * len(config.model), binding, config.cpu_reserve)
    except ValueError as error:
        raise StartRefused(f"--cpu-bind, --cpu-reserve: {error}") from None


def tokenizers_of(config: UpConfig, topology: Topology) -> int:
    """Return how many tokenizer services each model gets."""
    if config.tokenizers is not None:
        return config.tokenizers
    return 2 if min(topology.count, topology.limit) >= CORES_FOR_TWO_TOKENIZERS else 1


def described(placement: Placement) -> str:
    """Return a line that says who is bound to what, empty if nobody is."""
    bound = [format_cpus(one.cpus) for one in placement.engines if one.cpus is not None]
    if not bound:
        return ""
    services = format_cpus(placement.services) if placement.services else "all"
    return f"CPUs: engines {' | '.join(bound)}; services {services}"
