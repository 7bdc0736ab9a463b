"""What an operator decides about an HPU, by the engine's option names, and the kinds of card.

Source: docs/gaudi-facts.md 4.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from services.engine.device.base import DeviceError


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
