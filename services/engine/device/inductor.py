"""Devices for which torch itself has kernels and a compiler, which keeps code for each static shape."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch

from services.engine.device.attention import NO_FEATURES, AttentionFeatures, flat_decode, fused_prefill
from services.engine.device.base import Device, ExecutionMode, Forward, Function

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


class InductorDevice(Device):
    """What such devices share: mode COMPILE is torch's compiler, attention its own operations."""

    # Whether the fused attention that takes masks knows grouped heads.
    groups_masked: bool

    def compile(self, function: Function) -> Function:
        if self.mode is not ExecutionMode.COMPILE:
            return function
        # Layers that share code share what is compiled.
        return cast("Function", torch.compile(function, dynamic=False))

    def run_eagerly(self, forward: Forward, tensors: Sequence[torch.Tensor]) -> Any:
        if self.mode is not ExecutionMode.COMPILE:
            return forward(*tensors)
        with torch.compiler.set_stance("force_eager"):
            return forward(*tensors)

    @property
    def keeps_code(self) -> bool:
        return self.mode is ExecutionMode.COMPILE

    def keep_code(self, directory: Path) -> None:
        os.environ[_CACHE] = str(directory)

    def compilations(self) -> int:
        """Graphs that dynamo has given to the compiler in this process."""
        if self.mode is not ExecutionMode.COMPILE:
            return 0
        return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    def attend_prefill(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float,
        features: AttentionFeatures = NO_FEATURES,
        lengths: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return fused_prefill(query, key, value, mask, scale, features, groups_masked=self.groups_masked)

    def attend_decode(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        blocks: torch.Tensor,
        rows: torch.Tensor,
        bias: torch.Tensor,
        scale: float,
        features: AttentionFeatures = NO_FEATURES,
    ) -> torch.Tensor:
        return flat_decode(query, key_cache, value_cache, blocks, rows, bias, scale, features)
