"""What is known of the cards, from public specifications and published logs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Card:
    """One accelerator.

    `memory_gib`: what its runtime reports, of `nominal_gb`; `bytes_per_second` of its memory;
    `flops_per_second` of its matrix units in bfloat16. `fp8_max`: largest FP8 number that it keeps.
    """

    name: str
    nominal_gb: float
    memory_gib: float
    bytes_per_second: float
    flops_per_second: float
    fp8_max: int


# Start-up logs of Gaudi 2 say 94.62 GiB, users' reports of Gaudi 3 say 126.
CARDS: Final = {
    "gaudi2": Card("gaudi2", 96, 94.62, 2.45e12, 432e12, fp8_max=240),
    "gaudi3": Card("gaudi3", 128, 126.0, 3.7e12, 1835e12, fp8_max=448),
}
CARDS_PER_NODE: Final = 8
