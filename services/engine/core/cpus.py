"""Which CPUs the core computes on."""

from __future__ import annotations

import os

from catenary.cpus import Binding, EngineCpus, format_cpus, parse_binding, place, read_topology
from catenary.telemetry import get_logger
from services.engine.core.errors import StartError
from services.engine.options import EngineOptions

log = get_logger(__name__)


def bind_core(options: EngineOptions) -> None:
    """Keep this process, and every thread that it will start, on the CPUs of the options.

    Before anything is loaded, so that memory comes from the NUMA node of these CPUs. Raises StartError for
    CPUs that are not there or not allowed.
    """
    lists = parse_binding(options.cpu_bind).lists
    if options.device != "cpu":
        if lists or options.cpu_reserve is not None:
            log.warning("cpu_bind and cpu_reserve concern CPUs alone", device=options.device)
        return
    if not lists:
        return
    wanted = set(lists[0])
    try:
        os.sched_setaffinity(0, wanted)
    except OSError:
        bound: set[int] = set()
    else:
        bound = os.sched_getaffinity(0)
    if missing := wanted - bound:
        raise StartError(
            f"cpu_bind {options.cpu_bind}: CPU {format_cpus(missing)} is not there or not allowed"
        )


def cpus_of(options: EngineOptions) -> EngineCpus:
    """Threads of the forwards and, if they are bound, the CPU of each. Raises ValueError, one line."""
    try:
        # By itself an engine does not know who else computes here, so it takes no CPU that it was not given.
        binding = Binding(lists=parse_binding(options.cpu_bind).lists)
        placed = place(read_topology(), 1, binding, options.cpu_reserve or 0).engines[0]
    except ValueError as error:
        raise ValueError(f"cpu_bind, cpu_reserve: {error}") from None
    threads = options.device_threads
    if not threads:
        return placed
    if placed.cpus is None:
        return EngineCpus(threads)
    if threads > len(placed.cpus):
        raise ValueError(f"device_threads {threads} is more than the {len(placed.cpus)} CPUs of cpu_bind")
    return EngineCpus(threads, placed.cpus[:threads])
