"""Lazy execution: operations are collected and compiled together. Source: docs/gaudi-facts.md 3.5 and 4.1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from services.engine.device.base import Forward
from services.engine.device.hpu.bridge import Bridge
from services.engine.device.hpu.buffers import PersistentBuffers
from services.engine.device.hpu.execution.base import Execution
from services.engine.device.hpu.settings import HpuSettings


class LazyExecution(Execution):
    """LAZY: what lies between two flushes is one recipe, found again by the sequence of its operations.

    So a forward begins and ends with a flush: its recipes then owe nothing to what comes before and after,
    which differs from step to step.
    """

    def __init__(self, bridge: Bridge, settings: HpuSettings, buffers: PersistentBuffers) -> None:
        super().__init__(bridge, settings, buffers)
        self._mark_steps = 0

    def run_eagerly(self, forward: Forward, tensors: Sequence[torch.Tensor]) -> Any:
        self.flush()
        result = forward(*tensors)
        self.flush()
        return result

    def flush(self) -> None:
        self._mark_steps += 1
        self.bridge.mark_step()

    def layer_done(self, index: int) -> None:
        # Bounds the size of a graph, and lets the device begin while the host collects the next layers.
        every = self.settings.layers_per_graph
        if every and (index + 1) % every == 0:
            self.flush()

    def counters(self) -> dict[str, int]:
        return {"mark_steps": self._mark_steps}
