"""Settings of an HPU, by the engine's option names, and the kinds of card.

Source: docs/gaudi-facts.md 4.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from catenary.devices import DEVICES
from catenary.telemetry import get_logger
from services.engine.device.base import DeviceError, ExecutionMode

if TYPE_CHECKING:
    from services.engine.options import EngineOptions

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class HpuProperties:
    """One kind of card, by the name that the driver gives it."""

    name: str


GAUDI2 = HpuProperties("GAUDI2")
GAUDI3 = HpuProperties("GAUDI3")


def properties_of(name: str) -> HpuProperties:
    """The kind of card that the driver calls `name`. Raises DeviceError for the first generation."""
    plain = name.upper().replace(" ", "").replace("-", "")
    for known in (GAUDI2, GAUDI3):
        # Variants carry a letter more: GAUDI2E, GAUDI2D.
        if plain.startswith(known.name):
            return known
    raise DeviceError(f"the card {name or 'without a name'} is not supported: Gaudi 2 and Gaudi 3 are")


class StepLog(Enum):
    """Which steps are reported: none, those in which something happened, or all of them."""

    OFF = "off"
    NEW = "new"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class RecipeCache:
    """A directory for compiled recipes of up to `max_mib` MiB; `clear` empties it at start."""

    directory: Path
    max_mib: int = 10_240
    clear: bool = False


class Softmax(Enum):
    """In what attention computes scores and their softmax: the model's type, or float32.

    AUTO: as the model needs it, once that is known.
    """

    AUTO = "auto"
    FAST = "fast"
    FP32 = "fp32"


@dataclass(frozen=True, slots=True)
class AttentionSettings:
    """slice_from: keys from which on a prompt with context is attended in slices; 0 for never. slice_chunk:
    queries and keys of a slice.
    """

    softmax: Softmax = Softmax.AUTO
    slice_from: int = 8192
    slice_chunk: int = 4096


@dataclass(frozen=True, slots=True)
class HpuSettings:
    """layers_per_graph: decoder layers between two flushes of a lazy graph, 0 for none.

    regional_compilation: compile each layer, norm and the head apart, else a forward as a whole.
    compile_fullgraph: refuse code that breaks the compiler's graph. compile_only_warmup: compile without
    running, where forwards are compiled. weights_on_host: load weights to host memory before they move.
    gc_threshold_multiplier: of Python's collection thresholds. numa_binding: run near the card.
    kernels: fused kernels to switch on or off, as `parse_switches` reads them.
    """

    layers_per_graph: int = 1
    regional_compilation: bool = True
    compile_fullgraph: bool = False
    compile_only_warmup: bool = True
    weights_on_host: bool = False
    recipe_cache: RecipeCache | None = None
    gc_threshold_multiplier: int = 16
    numa_binding: bool = True
    log_compilations: StepLog = StepLog.OFF
    log_fallbacks: StepLog = StepLog.OFF
    attention: AttentionSettings = AttentionSettings()
    kernels: str = ""


def hpu_settings(options: EngineOptions) -> HpuSettings:
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


# Settings that have a meaning in some modes alone.
_LAZY = (ExecutionMode.LAZY, ExecutionMode.GRAPH)
_COMPILED = (ExecutionMode.COMPILE,)
_MODES = {
    "layers_per_graph": _LAZY,
    "regional_compilation": _COMPILED,
    "compile_fullgraph": _COMPILED,
    "compile_only_warmup": _COMPILED,
}


def warn_idle(device: str, mode: ExecutionMode, settings: HpuSettings) -> None:
    """Warn of settings that change nothing on this device or in this mode."""
    default = HpuSettings()
    if not DEVICES[device].gaudi:
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
