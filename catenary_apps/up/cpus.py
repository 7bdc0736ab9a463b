"""The CPUs of the engines of a deployment, and how many tokenizers a machine has room for beside them."""

from __future__ import annotations

from collections.abc import Mapping

from catenary.config import ConfigError
from catenary.cpus import Binding, Placement, Topology, format_cpus, parse_binding, place
from catenary_apps.up.config import UpConfig

BIND_ENV = "CATENARY_ENGINE_CPU_BIND"
THREADS_ENV = "CATENARY_ENGINE_DEVICE_THREADS"
CORES_FOR_TWO_TOKENIZERS = 8


def cpus_of(config: UpConfig, topology: Topology, environment: Mapping[str, str]) -> Placement | None:
    """Return the CPUs of engines and services; None if no engine uses a CPU. Raises StartRefused."""
    if config.device not in ("cpu", "sim"):
        return None
    binding = parse_binding(config.cpu_bind)
    if config.device == "sim" or (
        binding.auto and any(environment.get(name) for name in (BIND_ENV, THREADS_ENV))
    ):
        # Variables of the engines themselves bind them: this command leaves it to them.
        binding = Binding()
    try:
        return place(topology, config.engines * len(config.model), binding, config.cpu_reserve)
    except ValueError as error:
        raise ConfigError(f"--cpu-bind, --cpu-reserve: {error}") from None


def tokenizers_of(config: UpConfig, topology: Topology) -> int:
    """Return how many tokenizer services each model gets."""
    if config.tokenizers is not None:
        return config.tokenizers
    return 2 if min(topology.count, topology.limit) >= CORES_FOR_TWO_TOKENIZERS else 1


def described(placement: Placement) -> str:
    """Return a line with the CPUs that engines and services are bound to, empty if none is bound."""
    bound = [format_cpus(one.cpus) for one in placement.engines if one.cpus is not None]
    if not bound:
        return ""
    services = format_cpus(placement.services) if placement.services else "all"
    return f"CPUs: engines {' | '.join(bound)}; services {services}"
