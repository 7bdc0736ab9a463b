"""Copies to the host that do not wait: what they bring is there once the device has been waited for."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


def spoil(tensor: torch.Tensor) -> None:
    """Fills a tensor with what nobody may rely on."""
    if tensor.dtype.is_floating_point:
        tensor.fill_(float("nan"))
    elif tensor.dtype is torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).max)


@dataclass(slots=True)
class HostCopies:
    """Copies in the order in which they were begun; `begun` counts all since the start."""

    begun: int = 0
    _waiting: list[tuple[int, torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def begin(self, target: torch.Tensor, data: torch.Tensor) -> None:
        """`target` holds rubbish until a wait."""
        spoil(target)
        self.begun += 1
        self._waiting.append((self.begun, target, data))

    def finish(self, upto: int | None = None) -> None:
        """Completes the copies that were begun as number `upto` or before; None: all."""
        left = []
        for number, target, data in self._waiting:
            if upto is None or number <= upto:
                # Begun in inference mode, as a rule, and waited for outside of it.
                with torch.inference_mode():
                    target.copy_(data)
            else:
                left.append((number, target, data))
        self._waiting = left
