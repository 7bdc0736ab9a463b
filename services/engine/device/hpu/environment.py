"""What has to stand in the environment before Habana's bridge is imported: it reads most of it once.

Source: docs/gaudi-facts.md 4.1, 4.6 and 4.7.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import MutableMapping

from services.engine.device.base import DeviceError
from services.engine.device.modes import ExecutionMode

_LAZY = "PT_HPU_LAZY_MODE"

# Values that the operator's own win over.
_DEFAULTS = {
    # Weights are not kept a second time on the host: faster loading, and quantized ones need it.
    "PT_HPU_WEIGHT_SHARING": "0",
    "EXPERIMENTAL_WEIGHT_SHARING": "0",
    # Shapes are static here; refining dynamic ones would only cost compilations.
    "PT_HPU_ENABLE_REFINE_DYNAMIC_SHAPES": "0",
    "FUSER_ENABLE_MULTI_THREADED_INVOCATIONS": "1",
    # How often recipes came from the cache.
    "PT_HPU_ENABLE_CACHE_METRICS": "1",
}
# Collectives inside of a captured graph.
_LAZY_DEFAULTS = {"PT_HPU_ENABLE_LAZY_COLLECTIVES": "true"}


def prepare_environment(mode: ExecutionMode, environment: MutableMapping[str, str] = os.environ) -> None:
    """Sets the variables that the execution mode needs.

    Raises DeviceError if the operator's lazy mode contradicts it.
    """
    lazy = "1" if mode in (ExecutionMode.LAZY, ExecutionMode.GRAPH) else "0"
    given = environment.get(_LAZY)
    if given is not None and given != lazy:
        raise DeviceError(f"{_LAZY}={given} does not go with execution mode {mode.value}: unset it")
    environment[_LAZY] = lazy
    for name, value in (_DEFAULTS | (_LAZY_DEFAULTS if lazy == "1" else {})).items():
        environment.setdefault(name, value)


def spawn_children() -> None:
    """Makes multiprocessing start children anew: a forked one inherits the driver's state and never ends."""
    multiprocessing.set_start_method("spawn", force=True)
