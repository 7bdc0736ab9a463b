"""The tensors that live as long as the engine: KV, hidden states, last tokens."""

from __future__ import annotations

import weakref

import torch


class PersistentBuffers:
    """Knows them by weak references: the pool of a profile run goes when that is over."""

    def __init__(self) -> None:
        self._known: list[weakref.ref[torch.Tensor]] = []

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """Takes note of a tensor and returns it."""
        self._known.append(weakref.ref(tensor))
        return tensor

    def alive(self) -> list[torch.Tensor]:
        """Those that are still in use."""
        self._known = [known for known in self._known if known() is not None]
        return [tensor for known in self._known if (tensor := known()) is not None]

    def clear(self) -> None:
        """Zeroes them."""
        for tensor in self.alive():
            tensor.zero_()
