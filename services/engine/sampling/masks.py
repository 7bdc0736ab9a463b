"""Which tokens may follow in the constrained rows of a step, on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


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

    def expanded(self, vocab_size: int) -> torch.Tensor:
        """One byte for each token, bool [M, vocab_size]: shifts of integers are slow on some devices."""
        flat = np.unpackbits(self.bits.view(np.uint8), axis=1, count=vocab_size, bitorder="little")
        return torch.from_numpy(flat.view(np.bool_))
