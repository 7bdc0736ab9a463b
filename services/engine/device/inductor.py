"""torch's own compiler, inductor, for the devices that it has code for."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch

from services.engine.device.base import Execution, Forward, Function

# One entry for each bucket of each kind of layer: dynamo's own limit is 8, beyond which it stops compiling.
_MOST_SHAPES = 8192
_CACHE = "TORCHINDUCTOR_CACHE_DIR"


def has_compiler() -> bool:
    """Return whether the C++ compiler that inductor would call is installed."""
    return shutil.which(os.environ.get("CXX", "g++")) is not None


def allow_many_shapes() -> None:
    """Raise dynamo's limits on recompilations for the calling thread: its options are thread-local."""
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, _MOST_SHAPES)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, _MOST_SHAPES)


class InductorExecution(Execution):
    """Mode COMPILE by torch's compiler, which keeps code for each static shape."""

    def compile(self, function: Function) -> Function:
        # Layers of one plan share compiled code.
        return cast("Function", torch.compile(function, dynamic=False))

    def run_eagerly(self, forward: Forward, tensors: Sequence[torch.Tensor]) -> Any:
        with torch.compiler.set_stance("force_eager"):
            return forward(*tensors)

    @property
    def keeps_code(self) -> bool:
        return True

    def keep_code(self, directory: Path) -> None:
        os.environ[_CACHE] = str(directory)

    def compilations(self) -> int:
        """Return the number of graphs that dynamo has given to the compiler in this process."""
        return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
