"""Compile-only mode, copies that do not wait, and pinned memory.

Copies to pinned memory have brought their data once their event has passed. Others land in a buffer of the
bridge, and are there for sure once the whole device has been waited for.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from services.engine.device.sim.settings import changed_while_read

# Views of a host tensor whose schemas do not say so.
_VIEWS = frozenset({torch.ops.aten._unsafe_view.default, torch.ops.aten._reshape_alias.default})
_ROWS = frozenset({torch.ops.aten.index_copy_.default, torch.ops.aten.index_fill_.int_Scalar})
_INTEGER = 0x7A7A7A7A


def spoil(tensor: torch.Tensor) -> None:
    """Fill a host tensor with what nobody should use: NaN, or a large integer, or True."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        # A fill knows no FP8; all bits set are a NaN in every format.
        if tensor.dtype.itemsize == 1:
            tensor.view(torch.uint8).fill_(0xFF)
        else:
            tensor.fill_(torch.nan)
    elif tensor.dtype is torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(_INTEGER % (torch.iinfo(tensor.dtype).max + 1))


def without_launch(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The results that an operation leaves behind when it is compiled but not launched.

    Over host tensors. Shapes are right and contents garbage, also those of what it would change in place; a
    view is one. Raises what torch raises where the result's shape depends on data.
    """
    if _is_view(operation):
        return operation(*args, **kwargs)
    results = _shapes(operation, args, kwargs)
    written = _written(operation, args, kwargs)
    if not written:
        return tree_map_only(torch.Tensor, _garbage, results)
    if operation in _ROWS:
        _spoil_rows(*args[:3])
    else:
        for tensor in written:
            spoil(tensor)
    if len(tree_leaves(results)) == 0:
        return None
    return written[0] if len(written) == 1 else type(results)(written)


def _is_view(operation: Any) -> bool:
    if operation in _VIEWS:
        return True
    aliases = [result.alias_info for result in operation._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _written(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for index, argument in enumerate(operation._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.extend(leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return found


def _shapes(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    meta_args, meta_kwargs = tree_map_only(torch.Tensor, _meta, (args, kwargs))
    if "device" in meta_kwargs:
        meta_kwargs["device"] = torch.device("meta")
    return operation(*meta_args, **meta_kwargs)


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _garbage(shape: torch.Tensor) -> torch.Tensor:
    tensor = torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype)
    spoil(tensor)
    return tensor


def _spoil_rows(target: torch.Tensor, dim: int, index: torch.Tensor) -> None:
    """Spoil the addressed rows alone: a cache may be large. All of it if the index is garbage itself."""
    inside = bool(((index >= 0) & (index < target.shape[dim])).all())
    if not inside or not target.dtype.is_floating_point or target.dtype.itemsize == 1:
        spoil(target)
    else:
        target.index_fill_(dim, index, torch.nan)


@dataclass(slots=True)
class HostCopies:
    """Copies in the order in which they were begun; `begun` counts all since the start."""

    begun: int = 0
    _waiting: list[tuple[int, torch.Tensor, torch.Tensor]] = field(default_factory=list)
    _pinned: set[int] = field(default_factory=set)
    _lent: list[tuple[int, torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same in pinned memory."""
        pinned = tensor.clone()
        address = pinned.untyped_storage().data_ptr()
        self._pinned.add(address)
        weakref.finalize(pinned.untyped_storage(), self._pinned.discard, address)
        return pinned

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return whether the card reads and writes its memory by itself."""
        return tensor.untyped_storage().data_ptr() in self._pinned

    def begin(self, target: torch.Tensor, data: torch.Tensor) -> None:
        """`target` holds rubbish until a wait."""
        spoil(target)
        self.begun += 1
        self._waiting.append((self.begun, target, data))

    def lend(self, source: torch.Tensor) -> None:
        """The device reads this host tensor some time before the next wait: it must not change until then."""
        self.begun += 1
        self._lent.append((self.begun, source, source.clone()))

    def finish(self, upto: int | None = None) -> None:
        """Complete the copies that were begun as number `upto` or before; None: all.

        Raises SimError if memory that was lent has changed.
        """
        lent, self._lent = self._lent, []
        for number, source, data in lent:
            if upto is not None and number > upto:
                self._lent.append((number, source, data))
            elif not torch.equal(_bytes(source), _bytes(data)):
                raise changed_while_read()
        left = []
        for number, target, data in self._waiting:
            if upto is None or (number <= upto and self.is_pinned(target)):
                # Begun in inference mode, as a rule, and waited for outside of it.
                with torch.inference_mode():
                    target.copy_(data)
            else:
                left.append((number, target, data))
        self._waiting = left


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
