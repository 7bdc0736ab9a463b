"""Tensors that modules keep from a warm-up that compiled without running: garbage that would stay."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn


class ModuleTensors:
    """The tensors that modules hold now: parameters, buffers and plain attributes, in containers too."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = tuple(modules)
        # With the tensors themselves, so that no other gets the identity of one that goes.
        self._before = {id(tensor): (tensor, _version(tensor)) for _, tensor in self._held()}

    def changed(self, known: Sequence[torch.Tensor]) -> list[str]:
        """Names of tensors that were made or written since then, but for `known` ones and views of them."""
        expected = {id(tensor) for tensor in known}
        return sorted({name for name, tensor in self._held() if self._differs(tensor, expected)})

    def _differs(self, tensor: torch.Tensor, expected: set[int]) -> bool:
        if id(tensor) in expected or id(tensor._base) in expected:
            return False
        _, version = self._before.get(id(tensor), (None, None))
        return version is None or version != _version(tensor)

    def _held(self) -> Iterator[tuple[str, torch.Tensor]]:
        seen: set[int] = set()
        for root in self._modules:
            for name, module in root.named_modules():
                for attribute, value in vars(module).items():
                    # Parameters and buffers lie in these two dicts, whose names are left out of the path.
                    inner = "" if attribute in ("_parameters", "_buffers") else attribute
                    for path, tensor in _tensors(value, inner, seen):
                        yield ".".join(filter(None, (name, path))), tensor


def _tensors(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in nested containers. Other objects may know anything, such as the device."""
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    items: Iterable[tuple[Any, Any]]
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, (list, tuple, set)):
        items = enumerate(value)
    else:
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    for key, item in items:
        yield from _tensors(item, f"{path}.{key}" if path else str(key), seen)


def _version(tensor: torch.Tensor) -> int:
    """How often a tensor was written in place; tensors of inference mode do not count it."""
    return 0 if tensor.is_inference() else tensor._version
