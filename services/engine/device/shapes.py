"""Counts the tensor shapes a device has seen: on a graph device each new one is a compilation."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

ShapeKey = tuple[str, Hashable, tuple[tuple[tuple[int, ...], torch.dtype], ...]]


def shape_key(phase: str, tensors: Sequence[torch.Tensor], name: Hashable = None) -> ShapeKey:
    """What makes two forwards of a phase the same to a compiler: shapes and dtypes of their inputs.

    `name` is that of the static shape: inputs of several may lie in tensors of one length.
    """
    return phase, name, tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)


class ShapeCounter:
    """Remembers which forwards were already made, by the real shapes and dtypes of their inputs."""

    def __init__(self) -> None:
        self._seen: set[ShapeKey] = set()

    def note(self, phase: str, tensors: Sequence[torch.Tensor]) -> bool:
        """Records one forward's inputs; True if this device meets their shapes for the first time."""
        return self.note_key(shape_key(phase, tensors))

    def note_key(self, key: ShapeKey) -> bool:
        """The same for a key that `shape_key` made."""
        if key in self._seen:
            return False
        self._seen.add(key)
        return True

    @property
    def first_seen(self) -> int:
        """How many different forwards this device has met."""
        return len(self._seen)
