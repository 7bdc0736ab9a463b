"""One copy to the host for all that a step has to tell."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from services.engine.device import Device


class PackedCopy:
    """Several tensors on their way to the host as one, in the widest float: ids below 2**24 stay exact."""

    def __init__(self, device: Device, parts: Sequence[torch.Tensor]) -> None:
        self._shapes = [part.shape for part in parts]
        flat = [part.flatten().to(device.wide_dtype) for part in parts]
        self._copy = device.begin_to_host(torch.cat(flat) if len(flat) > 1 else flat[0])

    def wait(self) -> list[torch.Tensor]:
        """The tensors on the host, once they are there, in their shapes."""
        host, start = self._copy.wait(), 0
        parts: list[torch.Tensor] = []
        for shape in self._shapes:
            parts.append(host[start : start + shape.numel()].view(shape))
            start += shape.numel()
        return parts
