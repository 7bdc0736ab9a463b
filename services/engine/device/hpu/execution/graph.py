"""HPU graphs: a forward is recorded for each static shape and replayed. Source: facts/gaudi.md 4.2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from services.engine.device.base import DeviceError, Forward
from services.engine.device.hpu.bridge import Bridge
from services.engine.device.hpu.buffers import PersistentBuffers
from services.engine.device.hpu.execution.lazy import LazyExecution
from services.engine.device.hpu.settings import HpuSettings


class GraphExecution(LazyExecution):
    """GRAPH: lazy execution with graphs."""

    def __init__(self, bridge: Bridge, settings: HpuSettings, buffers: PersistentBuffers) -> None:
        super().__init__(bridge, settings, buffers)
        if bridge.wrap_in_hpu_graph is None:
            raise DeviceError("HPU graphs need PT_HPU_LAZY_MODE=1")
        self._wrap = bridge.wrap_in_hpu_graph
        self._captures = 0
        self._replays = 0
        self._recording = False

    def capture(self, forward: Forward, tensors: Sequence[torch.Tensor]) -> Forward:
        self.flush()
        graph = Graph(forward, tensors, self.buffers.alive(), self._wrap, self._before_replay)
        self._recording = True
        try:
            graph.record()
        finally:
            self._recording = False
        self._captures += 1
        return graph

    def layer_done(self, index: int) -> None:
        # A graph is one piece: a flush inside of its capture would cut it.
        if not self._recording:
            super().layer_done(index)

    def counters(self) -> dict[str, int]:
        return super().counters() | {"captures": self._captures, "replays": self._replays}

    def _before_replay(self) -> None:
        self._replays += 1
        # What made the inputs is one recipe, and their copies into the graph are another.
        self.flush()


class Graph:
    """One forward, recorded for one shape.

    A wrapped module's key is a hash of the shapes and views of tensors, and of the values of everything else:
    so it gets tensors alone, always the same ones, which are the graph's own. A replay overwrites what the
    last one returned, and a forward's inputs too, which therefore must not be a buffer of somebody else.
    """

    def __init__(
        self,
        forward: Forward,
        tensors: Sequence[torch.Tensor],
        buffers: list[torch.Tensor],
        wrap: Callable[..., Any],
        before_replay: Callable[[], None],
    ) -> None:
        self._inputs = tuple(tensor.clone() for tensor in tensors)
        self._before_replay = before_replay
        # The buffers that the forward reads and writes beside its arguments: without the tensor cache the
        # bridge keeps what it is told of and frees the rest.
        self._kept = buffers
        # One graph for each module: a key that differs after all runs eagerly instead of holding memory.
        self._module = wrap(_Module(forward), disable_tensor_cache=True, max_graphs=1)

    def record(self) -> Any:
        """Records the forward, which runs once."""
        return self._module(*self._inputs, cache_tensors_list=self._kept)

    def __call__(self, *tensors: torch.Tensor) -> Any:
        self._before_replay()
        for own, given in zip(self._inputs, tensors, strict=True):
            own.copy_(given)
        return self._module(*self._inputs, cache_tensors_list=self._kept)


class _Module(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.run = forward

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.run(*tensors)
