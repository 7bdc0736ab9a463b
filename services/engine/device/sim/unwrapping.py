"""From the arguments of an operation to those of the CPU's."""

from __future__ import annotations

from typing import Any, Final

import torch

from services.engine.device.sim.tensor import DEVICE, SimTensor

_CPU: Final = torch.device("cpu")
_MASKS: Final = (torch.bool, torch.uint8)


class Call:
    """Arguments with the CPU's tensors in place of the device's.

    tensors: the device's tensors, in order. host: whether a host tensor with dimensions is among them; one
    without is taken as a number. double: whether one of the device's is float64. device: what the keyword
    names, "" without. bool_index: whether a list of indices holds bools. tracing: the tensors are dynamo's
    fakes.
    """

    __slots__ = (
        "args",
        "bool_index",
        "device",
        "double",
        "host",
        "kwargs",
        "non_blocking",
        "parts",
        "tensors",
        "tracing",
    )

    def __init__(self) -> None:
        self.args: list[Any] = []
        self.kwargs: dict[str, Any] = {}
        self.tensors: list[SimTensor] = []
        self.parts: list[Any] = []
        self.host = False
        self.double = False
        self.tracing = False
        self.bool_index = False
        self.non_blocking = False
        self.device = ""

    def signature(self) -> tuple[Any, ...]:
        """What makes two calls the same to a compiler: shapes, dtypes, strides, and all else by value."""
        return tuple(self.parts)


def unwrap(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Reads a call."""
    call = Call()
    for value in args:
        call.args.append(_host_value(value, call))
    for name, value in kwargs.items():
        if name == "device":
            call.device = "" if value is None else torch.device(value).type
            call.kwargs[name] = _CPU if call.device == DEVICE else value
        elif name == "pin_memory":
            # There is no pinned memory for this device (gaudi-facts.md 4.3).
            call.kwargs[name] = False
        else:
            call.kwargs[name] = _host_value(value, call)
            if name == "non_blocking":
                call.non_blocking = bool(value)
    if len(args) > 2 and args[2] is True:
        # copy_(target, source, non_blocking)
        call.non_blocking = True
    return call


def _strides(raw: torch.Tensor) -> tuple[int, ...]:
    """Those that say where something lies: along a dimension of one element any number will do."""
    shape, strides = raw.shape, raw.stride()
    if 1 not in shape:
        return strides
    return tuple(stride if size != 1 else 0 for size, stride in zip(shape, strides, strict=True))


def _host_value(value: Any, call: Call) -> Any:
    if type(value) is SimTensor:
        raw = value.raw
        dtype = raw.dtype
        call.tensors.append(value)
        call.parts.append((raw.shape, dtype, _strides(raw)))
        if dtype is torch.float64:
            call.double = True
        if type(raw) is not torch.Tensor:
            call.tracing = True
        return raw
    if isinstance(value, torch.Tensor):
        if value.device.type == DEVICE:
            # Made by a traced function itself: dynamo's fake of a tensor of the device, not wrapped.
            call.tracing = True
            return _on_host(value)
        if value.dim():
            call.host = True
        call.parts.append((value.shape, value.dtype))
        return value
    if isinstance(value, (list, tuple)):
        call.parts.append(len(value))
        found = [_host_value(one, call) for one in value]
        if any(isinstance(one, torch.Tensor) and one.dtype in _MASKS for one in found):
            call.bool_index = True
        return found
    # With its type: 1, 1.0 and True are equal. NaN is not even equal to itself.
    call.parts.append((type(value), value if value == value else "nan"))
    return value


def _on_host(fake: Any) -> torch.Tensor:
    with fake.fake_mode:
        return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype)
