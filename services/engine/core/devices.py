"""An engine's device, from its options."""

from __future__ import annotations

import os
from pathlib import Path

from catenary.telemetry import get_logger
from services.engine.core.options import CoreOptions
from services.engine.device import (
    AttentionSettings,
    Device,
    HpuSettings,
    RecipeCache,
    Softmax,
    StepLog,
    execution_mode,
    open_device,
)

log = get_logger(__name__)

_HPUS = ("hpu", "sim")


def device_of(options: CoreOptions) -> Device:
    """Opens it. Raises DeviceError, or ValueError for options that contradict each other."""
    mode = execution_mode(
        options.device,
        compiled=options.compile,
        enforce_eager=options.enforce_eager,
        lazy=os.environ.get("PT_HPU_LAZY_MODE"),
    )
    settings = hpu_settings(options)
    if options.device not in _HPUS and settings != HpuSettings():
        log.warning("options that concern HPUs alone change nothing here", device=options.device)
    return open_device(options.device, threads=options.device_threads or None, mode=mode, hpu=settings)


def hpu_settings(options: CoreOptions) -> HpuSettings:
    """The part of the options that an HPU takes."""
    cache = None
    if options.recipe_cache is not None:
        cache = RecipeCache(Path(options.recipe_cache), options.recipe_cache_mib, options.recipe_cache_clear)
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
