"""An engine's device and the CPUs it computes on, from the options."""

from __future__ import annotations

import os

import torch

from catenary.cpus import Binding, EngineCpus, parse_binding, place, read_topology
from catenary.directories import expanded
from catenary.telemetry import get_logger
from services.engine.device import (
    AttentionSettings,
    CpuSettings,
    Device,
    ExecutionMode,
    HpuSettings,
    KernelChoice,
    Quantization,
    RecipeCache,
    Softmax,
    StepLog,
    execution_mode,
    open_device,
)
from services.engine.options import EngineOptions

log = get_logger(__name__)


def cpus_of(options: EngineOptions) -> EngineCpus:
    """Return the threads of the forwards and, if bound, the CPU of each. Raises ValueError, one line."""
    try:
        # An engine does not know the other users of the machine, so it takes no CPU that it was not given.
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


_HPUS = ("hpu", "sim")

# Settings that have an effect in some modes alone.
_LAZY = (ExecutionMode.LAZY, ExecutionMode.GRAPH)
_COMPILED = (ExecutionMode.COMPILE,)
_MODES = {
    "layers_per_graph": _LAZY,
    "regional_compilation": _COMPILED,
    "compile_fullgraph": _COMPILED,
    "compile_only_warmup": _COMPILED,
}


def device_of(options: EngineOptions) -> Device:
    """Open the device of the options. Raises DeviceError, or ValueError for contradicting options."""
    mode = execution_mode(
        options.device,
        compiled=options.compile,
        enforce_eager=options.enforce_eager,
        lazy=os.environ.get("PT_HPU_LAZY_MODE"),
    )
    settings = hpu_settings(options)
    _name_idle(options.device, mode, settings)
    if options.device == "cpu":
        placed = cpus_of(options)
        return open_device("cpu", threads=placed.threads, mode=mode, cpu=cpu_settings(options, placed.cpus))
    if options.device == "sim" and options.device_threads:
        torch.set_num_threads(options.device_threads)
    return open_device(options.device, mode=mode, hpu=settings)


def _name_idle(device: str, mode: ExecutionMode, settings: HpuSettings) -> None:
    default = HpuSettings()
    if device not in _HPUS:
        if settings != default:
            log.warning("options that concern HPUs alone change nothing here", device=device)
        return
    idle = [
        name
        for name, modes in _MODES.items()
        if mode not in modes and getattr(settings, name) != getattr(default, name)
    ]
    if idle:
        log.warning("options that change nothing in this execution mode", options=idle, mode=mode.value)


def cpu_settings(options: EngineOptions, cpus: tuple[int, ...] | None = None) -> CpuSettings:
    """Return the part of the options that a CPU takes."""
    packed = None if options.quantization == "none" else Quantization(options.quantization)
    cache = expanded(options.cache_dir) if options.cache_dir else None
    return CpuSettings(
        KernelChoice(options.cpu_kernels),
        packed,
        cpus,
        cache,
        options.cpu_slice_us,
        options.cpu_kernels_compile_timeout_s,
    )


def hpu_settings(options: EngineOptions) -> HpuSettings:
    """Return the part of the options that an HPU takes."""
    cache = None
    if options.recipe_cache is not None:
        cache = RecipeCache(options.recipe_cache, options.recipe_cache_mib, options.recipe_cache_clear)
    return HpuSettings(
        layers_per_graph=options.layers_per_graph,
        regional_compilation=options.regional_compilation,
        compile_fullgraph=options.compile_fullgraph,
        compile_only_warmup=options.compile_only_warmup,
        weights_on_host=options.weights_load_device == "cpu",
        recipe_cache=cache,
        gc_threshold_multiplier=options.gc_threshold_multiplier,
        numa_binding=options.numa_binding,
        log_compilations=StepLog(options.log_step_compilations),
        log_fallbacks=StepLog(options.log_step_fallbacks),
        attention=AttentionSettings(
            Softmax(options.attention_softmax), options.attention_slice_from, options.attention_slice_chunk
        ),
        kernels=options.kernels,
    )
