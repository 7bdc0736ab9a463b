"""Tensors that report the device `hpu` and compute on the CPU, in memory that is finite.

PrivateUse1 is renamed to `hpu` and its operations are those of a wrapper subclass, so that each operation,
and each look of the host at a result, passes through the card (docs/gaudi-facts.md section 9).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from services.engine.device.sim.settings import out_of_memory


class Hbm:
    """Bytes in use of `limit` (gaudi-facts.md 4.3: mem_get_info is (Limit - InUse, Limit))."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_use = 0
        self.most_in_use = 0
        self.allocations = 0
        self.frees = 0
        self.largest = 0

    @property
    def free(self) -> int:
        """Bytes that are left."""
        return self.limit - self.in_use

    def take(self, size: int) -> Block:
        """Allocate. Raises SimError if it does not fit."""
        if size > self.limit - self.in_use:
            raise out_of_memory(size, self.free)
        self.in_use += size
        self.most_in_use = max(self.most_in_use, self.in_use)
        self.allocations += 1
        self.largest = max(self.largest, size)
        return Block(self, size)

    def reset_peak(self) -> None:
        """Forget the most that was in use."""
        self.most_in_use = self.in_use


class Block:
    """A piece of the memory, free again once nobody holds it. Views of a storage share one."""

    __slots__ = ("_hbm", "size")

    def __init__(self, hbm: Hbm, size: int) -> None:
        self._hbm = hbm
        self.size = size

    def __del__(self) -> None:
        self._hbm.in_use -= self.size
        self._hbm.frees += 1


DEVICE: Final = "hpu"
INDEXED: Final = "hpu:0"
# The same, for torch had no such name when this was loaded.
_DEVICE: Final = torch.device("privateuseone", 0)

# No operation of lazy mode made it.
NOT_MADE: Final = (0, 0)

# By identity, which is faster than an overload's hash; each is kept so that no other takes its place.
_composite: dict[int, tuple[Any, bool]] = {}
_IMPLICIT: Final = torch._C.DispatchKey.CompositeImplicitAutograd


class SimTensor(torch.Tensor):
    """Wraps the CPU tensor `raw`. `block` keeps its storage's share of the card's memory alive.

    derived: whether it is a view of another tensor. made: which operation since the last flush made it, by
    (generation, position).
    """

    raw: torch.Tensor
    block: Any
    derived: bool
    made: tuple[int, int]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, raw: torch.Tensor, block: Any = None, derived: bool = False) -> SimTensor:
        """Give `raw` the device's name."""
        # Not as a tensor of inference mode: views of tensors from outside of it could not be made there.
        # Torch's own context manager takes as long as all else here.
        with torch._C._InferenceMode(False):
            tensor: SimTensor = torch.Tensor._make_wrapper_subclass(
                cls,
                raw.shape,
                dtype=raw.dtype,
                device=_DEVICE,
                strides=raw.stride(),
                storage_offset=raw.storage_offset(),
                # Dynamo would empty the storage of its fake of an empty tensor, which takes a C++ hook.
                storage_size=None if raw.numel() else 1,
            )
        tensor.raw = raw
        tensor.block = block
        tensor.derived = derived
        tensor.made = NOT_MADE
        return tensor

    def __init__(self, raw: torch.Tensor, block: Any = None, derived: bool = False) -> None:
        """`__new__` does all."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["raw"], None

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: None, size: Any, stride: Any
    ) -> SimTensor:
        return SimTensor(inner["raw"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        known = _composite.get(id(func))
        if known is None:
            known = _composite[id(func)] = func, _decomposes(func)
        if known[1]:
            # In inference mode these arrive whole, and a copy to the host would not be seen as one.
            return func._op_dk(_IMPLICIT, *args, **(kwargs or {}))
        return _dispatch(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"SimTensor({self.raw!r}, device='{INDEXED}')"

    def tolist(self) -> Any:
        """A copy to the host, as on a card."""
        return self.cpu().tolist()


def _decomposes(func: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def _nowhere(func: Any, args: Any, kwargs: Any) -> Any:
    raise RuntimeError("the simulated hpu is not installed")


_dispatch: Callable[[Any, Any, Any], Any] = _nowhere


def send_operations_to(dispatch: Callable[[Any, Any, Any], Any]) -> None:
    """From now on operations on the tensors go to this function of (operation, arguments, keywords)."""
    global _dispatch
    _dispatch = dispatch


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
        """Return the key of calls that a compiler takes for one: shapes, dtypes, strides, other values."""
        return tuple(self.parts)


def unwrap(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Read a call."""
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
    """Return the strides that matter: along a dimension of one element any number will do."""
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
