"""Which tokens may follow in the constrained rows of a step, on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from services.engine.device import Device


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """In row rows[m] of a step those tokens may follow whose bit is set in bits[m], the lowest bit first.

    bits int32 [M, W], with W * 32 at least the width of the logits.
    """

    rows: list[int]
    bits: np.ndarray[Any, np.dtype[np.int32]]

    def take(self, index: list[int]) -> TokenMasks:
        """Those of these indexes into `rows`, any of them several times."""
        if index == list(range(len(self.rows))):
            return self
        return TokenMasks([self.rows[i] for i in index], self.bits[index])


class MaskBuffer:
    """Host memory that masks are sent from, cleared when the device has no use any more for what was sent."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._host = torch.empty(0, dtype=torch.bool)
        self._used = 0

    def clear(self) -> None:
        """From now on it may be filled again."""
        self._used = 0

    def send(self, masks: TokenMasks, vocab_size: int) -> torch.Tensor:
        """One byte for each token, bool [M, vocab_size]: shifts of integers are slow on some devices."""
        bits = masks.bits.view(np.uint8)
        flat = np.unpackbits(bits, axis=1, count=vocab_size, bitorder="little").view(np.bool_)
        if self._used + flat.size > self._host.numel():
            # What was sent from the old one keeps it alive.
            self._host = self._device.host_buffer(-(-2 * flat.size // 8)).view(torch.bool)
            self._used = 0
        part = self._host[self._used : self._used + flat.size].view(flat.shape)
        part.numpy()[:] = flat
        self._used += flat.size
        return self._device.to_device(part)
