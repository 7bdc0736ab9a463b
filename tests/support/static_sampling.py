"""Sampling in static shapes without an engine around it, on a CPU that claims to need them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from services.engine.device import Device
from services.engine.device.cpu import CpuDevice
from services.engine.graphs import Graphs
from services.engine.sampling import (
    Call,
    Counts,
    MaskBuffer,
    Program,
    RowParams,
    SampledToken,
    StaticSizes,
    StaticStages,
    TokenMasks,
    allocate,
    unpack,
)

# What reads from the device or has a shape that depends on values.
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal")
# What an HPU's bridge registers no kernel for.
MISSING = ("searchsorted", "view.dtype", "index_reduce", "histc", "bincount")


class StaticCpu(CpuDevice):
    """A CPU to which each new shape is a compilation; without float64 if told so."""

    def __init__(self, *, wide: torch.dtype = torch.float64) -> None:
        super().__init__(1)
        self.capabilities = replace(self.capabilities, static_shapes=True, wide_dtype=wide)


STATIC_CPU = StaticCpu()


class ShapeWatch(TorchDispatchMode):
    """Notes operations with the shapes, dtypes and plain values of their arguments; refuses what waits."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[Any, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.")
        packet = func.overloadpacket.__name__
        masked = packet == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])
        if packet in WAITS or masked:
            raise AssertionError(f"{name} waits for the device")
        if packet in MISSING or name in MISSING:
            raise AssertionError(f"{name} is not native on an HPU")
        out = func(*args, **(kwargs or {}))
        if name != "to.dtype_layout":  # that is how a tensor goes to the host, which takes no computation
            self.seen.add((name, _described(args), _described(tuple((kwargs or {}).items()))))
        return out


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype, value.stride(), value.storage_offset()
    if isinstance(value, (list, tuple)):
        return tuple(map(_described, value))
    return str(value)


class StaticSampler:
    """Samples logits of up to `rows` rows over `vocab` tokens."""

    def __init__(self, rows: int, vocab: int, device: Device = STATIC_CPU) -> None:
        self.graphs = Graphs(device, block_size=8)
        self.buffers = allocate(device, StaticSizes(rows, 1, 1, 1), vocab, vocab, torch.float32)
        self.hidden = device.memory.zeros((rows + 1, vocab), torch.float32)
        self.last_tokens = device.memory.zeros((rows + 4,), torch.int64)
        self.program = Program(device, vocab, Counts.static((rows,), vocab), 1, 1)
        # A hidden state is its own logits.
        self._stages = StaticStages(
            lambda hidden: hidden, self.hidden, self.last_tokens, self.buffers, device
        )
        self._device, self._rows, self._vocab = device, rows, vocab
        self.watch: AbstractContextManager[Any] = nullcontext()

    def visit(self) -> None:
        """Runs every static shape on padding."""
        names = [(phase, count) for phase, counts in self.program.counts.items() for count in counts]
        calls = [self.program.dummy(*name, self.buffers.harmless) for name in names]
        with self.watch:
            for call in calls:
                self._run(call)

    @torch.inference_mode()
    def _run(self, call: Call) -> None:
        # Inputs are made outside of inference mode, as a runner's are.
        tensors = [tensor for tensor in call.tensors if tensor is not None]
        self.graphs.run(call.phase, call.key, self._stages.forward(call), tensors)

    def run(
        self,
        logits: torch.Tensor,
        rows: list[RowParams],
        last_tokens: Sequence[int] = (0,),
        masks: TokenMasks | None = None,
    ) -> list[SampledToken]:
        """Samples the first rows of logits [R, V], and checks that the tokens are kept."""
        hidden = torch.zeros(self._rows + 1, self._vocab)
        hidden[: logits.shape[0]] = logits
        self.hidden.copy_(self._device.memory.to_device(hidden))
        tokens = torch.tensor([*last_tokens, *[0] * (self._rows + 4 - len(last_tokens))])
        self.last_tokens.copy_(self._device.memory.to_device(tokens))
        found = self.program.sampling(rows, [self._rows + 3] * len(rows), masked=masks is not None)
        calls = (
            *found.scores,
            *(self.program.masks(masks, MaskBuffer(self._device)) if masks else ()),
            *found.tokens,
        )
        with self.watch:
            for call in (*calls, self.program.result(1, self.buffers.harmless)):
                self._run(call)
        _, packed = self.buffers.unpack(self._device.stream.to_host(self.buffers.results[0]))
        return unpack(packed, rows)


def run_static(
    logits: torch.Tensor,
    rows: list[RowParams],
    *,
    last_tokens: Sequence[int] = (0,),
    device: Device = STATIC_CPU,
    masks: TokenMasks | None = None,
) -> list[SampledToken]:
    """As `tests.support.sampling.run`, in static shapes."""
    return StaticSampler(logits.shape[0], logits.shape[1], device).run(logits, rows, last_tokens, masks)
