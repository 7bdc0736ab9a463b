"""What the ways of executing forwards have in common; alone it is eager execution."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from services.engine.device.base import Forward, Function
from services.engine.device.hpu.bridge import Bridge
from services.engine.device.hpu.buffers import PersistentBuffers
from services.engine.device.hpu.settings import HpuSettings


class Execution:
    """EAGER: one kernel after the other. Each new combination of an operation and its shapes is compiled."""

    def __init__(self, bridge: Bridge, settings: HpuSettings, buffers: PersistentBuffers) -> None:
        self.bridge = bridge
        self.settings = settings
        self.buffers = buffers

    def compile(self, function: Function) -> Function:
        """Compiles a function of static shapes, where this is a compiler's mode."""
        return function

    def expect_shapes(self, count: int) -> None:
        """Told how many buckets are to come."""
        return

    def capture(self, forward: Forward, tensors: Sequence[torch.Tensor]) -> Forward:
        """See `Device.capture`."""
        return forward

    def run_eagerly(self, forward: Forward, tensors: Sequence[torch.Tensor]) -> Any:
        """Runs a forward without capturing or compiling it."""
        return forward(*tensors)

    def flush(self) -> None:
        """Ends what was collected."""
        return

    def layer_done(self, index: int) -> None:
        """Told after each decoder layer."""
        return

    def warming(self, modules: Iterable[nn.Module] = ()) -> AbstractContextManager[None]:
        """Around a warm-up before serving."""
        return nullcontext()

    def counters(self) -> dict[str, int]:
        """What this mode counts."""
        return {}
