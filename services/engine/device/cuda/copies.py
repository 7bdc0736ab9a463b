"""Copies to the host that do not stop it."""

from __future__ import annotations

import torch


class PinnedCopy:
    """A copy into pinned memory, begun in the order of the current stream."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._done.record()

    def wait(self) -> torch.Tensor:
        """The tensor on the host, once all of it is there."""
        self._done.synchronize()
        return self._host
