"""A CPU that has graphs: a capture records the device's operations on static buffers, a replay repeats them.

Like a real graph device it runs no Python of the forward again, keeps what was a constant at capture, and
gives outputs that the next replay overwrites: a value that should have been an input goes stale here too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from services.engine.device import Execution, ExecutionMode, Forward, MemoryFigures, MemoryUse
from services.engine.device.cpu import CpuDevice
from services.engine.device.cpu.device import CpuMemory

GIB = 2**30


class Tape(TorchDispatchMode):
    """Records operations with their arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:  # noqa: SLF001 - an operator's name
            raise RuntimeError("a host read inside of a capture")
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def play(self) -> dict[int, torch.Tensor]:
        """Repeats the operations; returns what each recorded tensor has become."""
        now: dict[int, torch.Tensor] = {}

        def current(value: Any) -> Any:
            return now.get(id(value), value) if isinstance(value, torch.Tensor) else value

        for func, args, kwargs, recorded in self.calls:
            result = func(*tree_map(current, args), **tree_map(current, kwargs))
            for old, new in zip(tree_flatten(recorded)[0], tree_flatten(result)[0], strict=True):
                if isinstance(old, torch.Tensor):
                    now[id(old)] = new
        return now


class Replay:
    """One captured forward."""

    def __init__(self, forward: Forward, tensors: Sequence[torch.Tensor]) -> None:
        self._inputs = [tensor.clone() for tensor in tensors]
        with Tape() as tape:
            result = forward(*self._inputs)
        self._tape = tape
        self._recorded, self._spec = tree_flatten(result)
        self._outputs = [
            value.clone() if isinstance(value, torch.Tensor) else value for value in self._recorded
        ]
        self.count = 0

    def __call__(self, *tensors: torch.Tensor) -> Any:
        for held, given in zip(self._inputs, tensors, strict=True):
            held.copy_(given)
        now = self._tape.play()
        for output, recorded in zip(self._outputs, self._recorded, strict=True):
            if isinstance(output, torch.Tensor):
                output.copy_(now.get(id(recorded), recorded))
        self.count += 1
        return self._spec.unflatten(self._outputs)


class GraphDevice(CpuDevice):
    """Captures with made-up memory: `cost` gives the bytes of a capture by its tensors, `memory_bytes` are
    there after loading. A capture, or an eager forward, for which `fails` is true has no memory.
    """

    def __init__(
        self,
        *,
        memory_bytes: int = GIB,
        cost: Callable[[Sequence[torch.Tensor]], int] = lambda tensors: 1000,
        fails: Callable[[Sequence[torch.Tensor]], bool] = lambda tensors: False,
        fails_eagerly: Callable[[Sequence[torch.Tensor]], bool] = lambda tensors: False,
        mode: ExecutionMode = ExecutionMode.GRAPH,
        static_shapes: bool = False,
    ) -> None:
        super().__init__(1, mode)
        self.memory_bytes = memory_bytes
        self.cost = cost
        self.fails = fails
        self.fails_eagerly = fails_eagerly
        self.held = 0
        self.peak = 0
        self.replays: list[Replay] = []
        self.eager = 0
        self.capabilities = replace(
            self.capabilities, measures_activations=True, kv_limit=None, static_shapes=static_shapes
        )
        self.memory = GraphMemory(self)
        self.execution = GraphExecution(self, mode)


class GraphMemory(CpuMemory):
    """Memory that captures alone take."""

    def __init__(self, device: GraphDevice) -> None:
        super().__init__(torch.device("cpu"))
        self._device = device

    def figures(self) -> MemoryFigures:
        total = self._device.memory_bytes
        return MemoryFigures(total, total - self._device.held)

    def measure(self, work: Callable[[], object]) -> MemoryUse:
        device = self._device
        before, device.peak = device.held, 0
        work()
        return MemoryUse(kept=device.held - before, peak=device.peak)


class GraphExecution(Execution):
    """Captures onto tapes."""

    def __init__(self, device: GraphDevice, mode: ExecutionMode) -> None:
        super().__init__(mode)
        self._device = device

    def capture(self, forward: Forward, tensors: Sequence[torch.Tensor]) -> Forward:
        device = self._device
        if device.fails(tensors):
            raise torch.OutOfMemoryError("no memory for this graph")
        replay = Replay(forward, tensors)
        device.replays.append(replay)
        device.held += device.cost(tensors)
        return replay

    def run_eagerly(self, forward: Forward, tensors: Sequence[torch.Tensor]) -> Any:
        device = self._device
        if device.fails_eagerly(tensors):
            raise torch.OutOfMemoryError("no memory for this forward")
        device.eager += 1
        device.peak = max(device.peak, 100 * sum(tensor.numel() for tensor in tensors))
        return super().run_eagerly(forward, tensors)
