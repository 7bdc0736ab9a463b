"""torch.compile for a CPU: code for each static shape, kept for the next start."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch

# One entry for each bucket of each kind of layer: dynamo's own limit is 8, beyond which it stops compiling.
_MOST_SHAPES = 8192
_CACHE = "TORCHINDUCTOR_CACHE_DIR"


def has_compiler() -> bool:
    """Whether the C++ compiler that inductor would call is there."""
    return shutil.which(os.environ.get("CXX", "g++")) is not None


def allow_many_shapes() -> None:
    """Lifts dynamo's limits on recompilations, for the calling thread: its options are a thread's own."""
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, _MOST_SHAPES)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, _MOST_SHAPES)


def inductor(function: Any) -> Any:
    """Compiles a function for static shapes. Layers that share code share what is compiled."""
    return torch.compile(function, dynamic=False)


def keep_code_in(directory: Path) -> None:
    """Makes inductor keep compiled code in a directory, and take it from there."""
    os.environ[_CACHE] = str(directory)


def compiled_graphs() -> int:
    """How many graphs dynamo has given to the compiler in this process."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
