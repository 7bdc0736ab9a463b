"""How `wrap_in_hpu_graph` tells one call from another (gaudi-facts.md 4.2)."""

from __future__ import annotations

import collections
from typing import Any

import torch


def input_hash(value: Any, autocast: bool = False) -> int:
    """The key of a call's (args, kwargs): tensors by shape and view, everything else by value.

    Neither a tensor's dtype nor its device is in it. A number that changes from call to call therefore gives
    a new key, and with it a new graph, each time. It is a plain hash: collisions go unnoticed.
    """
    if isinstance(value, dict):
        return input_hash(tuple(value.items()), autocast)
    if isinstance(value, list) or (isinstance(value, tuple) and not isinstance(value, torch.Size)):
        return hash((tuple(input_hash(item, autocast) for item in value), autocast))
    if isinstance(value, torch.Tensor):
        return hash((value.shape, view_hash(value), autocast))
    if isinstance(value, collections.UserDict):
        return hash(tuple((key, tuple(item)) for key, item in value.items()))
    return hash((value, autocast))


def view_hash(tensor: torch.Tensor) -> int:
    """0 for a tensor that is nobody's view, else of where its elements lie in the viewed one."""
    if tensor.is_contiguous() and tensor.storage_offset() == 0:
        return 0
    return hash((tensor.stride(), tensor.storage_offset()))


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in nested lists, tuples and dicts, in their order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in tensors_of(item)]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_of(item)]
    return []


def extract_tensors(value: Any) -> list[torch.Tensor]:
    """The same, and those that an object has as attributes."""
    if isinstance(value, (torch.Tensor, dict, list, tuple)):
        return tensors_of(value)
    return [tensor for item in getattr(value, "__dict__", {}).values() for tensor in extract_tensors(item)]


def copy_to(target: Any, source: Any) -> None:
    """Copies a call's tensors into those that were captured; everything else stays as captured.

    The types must agree, level by level, as they do under equal keys. Raises RuntimeError.
    """
    if type(target) is not type(source):
        raise RuntimeError(
            f"a graph captured {type(target).__name__} where it now gets {type(source).__name__}"
        )
    if isinstance(target, dict):
        for key in target:
            copy_to(target[key], source[key])
    elif isinstance(target, (list, tuple)) and not isinstance(target, torch.Size):
        for into, from_ in zip(target, source, strict=True):
            copy_to(into, from_)
    elif isinstance(target, torch.Tensor) and target is not source:
        target.copy_(source, non_blocking=True)
