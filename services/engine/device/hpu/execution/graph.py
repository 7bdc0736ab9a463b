"""HPU graphs: a forward is recorded for each static shape and replayed. Source: docs/gaudi-facts.md 4.2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from catenary.telemetry import get_logger
from services.engine.device.base import DeviceError, Forward
from services.engine.device.hpu.bridge import Bridge
from services.engine.device.hpu.buffers import PersistentBuffers
from services.engine.device.hpu.execution.lazy import LazyExecution
from services.engine.device.hpu.settings import HpuSettings

log = get_logger(__name__)


class GraphExecution(LazyExecution):
    """GRAPH: lazy execution with graphs."""

    def __init__(self, bridge: Bridge, settings: HpuSettings, buffers: PersistentBuffers) -> None:
        super().__init__(bridge, settings, buffers)
        if bridge.wrap_in_hpu_graph is None:
            raise DeviceError("HPU graphs need PT_HPU_LAZY_MODE=1")
        self._wrap = bridge.wrap_in_hpu_graph
        self._objects = takes_objects(bridge.graphs)
        self._captures = 0
        self._replays = 0
        self._recording = False

    def capture(self, forward: Forward, tensors: Sequence[torch.Tensor]) -> Forward:
        self.flush()
        buffers = self.buffers.alive()
        kept = Kept(buffers) if self._objects else buffers
        graph = Graph(forward, tensors, kept, self._wrap, self._before_replay)
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


class Kept:
    """Tensors that a graph's capture is told of in one argument, whose place in a call's key is its identity.

    The bridge hashes a list of tensors in each call, which for some hundred takes up to a millisecond.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tuple(tensors)

    def forget(self) -> None:
        """After the capture nothing is left to be looked for in replays."""
        self.tensors = ()


def takes_objects(graphs: Any) -> bool:
    """Whether this bridge finds tensors inside of an object, and does not make them part of a call's key."""
    find, key = getattr(graphs, "extract_tensors", None), getattr(graphs, "input_hash", None)
    if find is None or key is None:
        return False
    tensor = torch.zeros(1)
    kept = Kept((tensor,))
    try:
        found, before = find(kept), key(kept)
        kept.forget()
        return len(found) == 1 and found[0] is tensor and find(kept) == [] and key(kept) == before
    except Exception as error:
        log.debug("the bridge's graphs look at arguments in another way", reason=str(error))
        return False


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
        kept: Kept | list[torch.Tensor],
        wrap: Callable[..., Any],
        before_replay: Callable[[], None],
    ) -> None:
        self._inputs = tuple(tensor.clone() for tensor in tensors)
        self._before_replay = before_replay
        # The buffers that the forward reads and writes beside its arguments: without the tensor cache the
        # bridge keeps what it is told of and frees the rest.
        self._kept = kept
        # One graph for each module: a key that differs after all runs eagerly instead of holding memory.
        self._module = wrap(_Module(forward), disable_tensor_cache=True, max_graphs=1)

    def record(self) -> Any:
        """Records the forward, which runs once."""
        result = self._module(*self._inputs, cache_tensors_list=self._kept)
        if isinstance(self._kept, Kept):
            self._kept.forget()
        return result

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
