"""Finds operations whose result's shape depends on data: each outcome would be another graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_DYNAMIC = frozenset({"nonzero", "masked_select", "unique", "_unique2", "unique_dim", "unique_consecutive"})
_INDEXED = frozenset({"index", "index_put", "index_put_", "_index_put_impl_"})


class DynamicShape(Exception):
    """A forward with an operation whose shape depends on data. The text is the operation's name."""


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name in _INDEXED and any(
            isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        # With a condition alone it lists where that holds.
        listed = name == "where" and len(args) == 1
        if name in _DYNAMIC or listed or by_mask:
            raise DynamicShape("an index by a mask" if by_mask else name)
        return func(*args, **(kwargs or {}))


@contextmanager
def refuse_dynamic_shapes() -> Iterator[None]:
    """Within it, such an operation raises DynamicShape."""
    watch: Any = _Watch
    with watch():
        yield
