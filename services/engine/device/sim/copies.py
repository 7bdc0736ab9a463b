"""Copies that do not wait, and pinned memory.

Copies to pinned memory have brought their data once their event has passed. Others land in a buffer of the
bridge, and are there for sure once the whole device has been waited for.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch

from services.engine.device.sim.compile_only import spoil
from services.engine.device.sim.errors import changed_while_read


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
        """Whether the card reads and writes its memory by itself."""
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
        """Completes the copies that were begun as number `upto` or before; None: all.

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
