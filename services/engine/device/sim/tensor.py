"""A tensor that reports the device `hpu` and computes on the CPU.

PrivateUse1 is renamed to `hpu` and its operations are those of a wrapper subclass, so that each operation,
and each look of the host at a result, passes through the card (docs/gaudi-facts.md section 9).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

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
        """Gives `raw` the device's name."""
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
