"""From what the CPU computed to the device's tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from services.engine.device.sim.compile_only import spoil
from services.engine.device.sim.memory import Hbm
from services.engine.device.sim.operations import Operation
from services.engine.device.sim.tensor import SimTensor
from services.engine.device.sim.unwrapping import Call

_INT32: Final = torch.iinfo(torch.int32)


class Results:
    """Gives results their share of the memory, and the values that the device can hold.

    touch: acquires the card, which the first tensor does.
    """

    def __init__(self, hbm: Hbm, touch: Callable[[], None], *, wide_integers: bool) -> None:
        self._hbm = hbm
        self._touch = touch
        self._wide_integers = wide_integers

    def wrap(
        self, operation: Operation, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> Any:
        """What the operation returns. Raises SimError if the memory is full."""
        if operation.writes:
            return self._written(operation, args, kwargs)
        if call.device == "cpu":
            return result
        if isinstance(result, torch.Tensor):
            return self._one(operation, call, result)
        if isinstance(result, (list, tuple)):
            return type(result)(
                self._one(operation, call, one) if isinstance(one, torch.Tensor) else one for one in result
            )
        return result

    def new(self, raw: torch.Tensor, *, narrow: bool = True) -> SimTensor:
        """A new tensor of the device with this data. Raises SimError if the memory is full."""
        self._touch()
        tensor = SimTensor(raw, self._hbm.take(raw.untyped_storage().nbytes()))
        if narrow:
            self.narrow(raw)
        return tensor

    def narrow(self, raw: torch.Tensor) -> None:
        """What becomes of values that the device cannot hold.

        gaudi-facts.md 4.7: int64 is int32 in silence. The bridge's copies cast float64 likewise
        (`_local_scalar_dense` in gaudi-pytorch-bridge reads a float of a Double).
        """
        if raw.dtype is torch.int64:
            if not self._wide_integers and raw.numel():
                low, high = torch.aminmax(raw)
                if int(high) > _INT32.max or int(low) < _INT32.min:
                    raw.copy_(raw.to(torch.int32))
        elif raw.dtype is torch.float64:
            raw.copy_(raw.to(torch.float32))

    def _written(self, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        written = [
            args[position] if position < len(args) else kwargs[name] for position, name in operation.writes
        ]
        if not operation.keeps_range:
            for tensor in written:
                if type(tensor) is SimTensor:
                    self.narrow(tensor.raw)
        if operation.returns == 0:
            return None
        return written[0] if operation.returns == 1 else tuple(written)

    def _one(self, operation: Operation, call: Call, raw: torch.Tensor) -> SimTensor:
        if operation.view and call.tensors:
            base = call.tensors[0]
            return SimTensor(raw, base.block, base.derived or operation.shows)
        if operation.empty:
            spoil(raw)
        return self.new(raw, narrow=not operation.keeps_range)
