"""What is known of each kind of card.

Source: the vendor's public specifications, facts/gaudi.md (head) and 4.3.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.engine.device.base import DeviceError


@dataclass(frozen=True, slots=True)
class HpuProperties:
    """One kind of card: HBM in bytes, its bandwidth in bytes a second, and the largest float8 e4m3 number."""

    name: str
    hbm_bytes: int
    bandwidth: float
    float8_max: float


GAUDI2 = HpuProperties("GAUDI2", 96 * 2**30, 2.45e12, 240.0)
GAUDI3 = HpuProperties("GAUDI3", 128 * 2**30, 3.7e12, 448.0)


def properties_of(name: str) -> HpuProperties:
    """The kind of card that the driver calls `name`. Raises DeviceError for the first generation."""
    plain = name.upper().replace(" ", "").replace("-", "")
    for known in (GAUDI2, GAUDI3):
        # Variants carry a letter more: GAUDI2E, GAUDI2D.
        if plain.startswith(known.name):
            return known
    raise DeviceError(f"the card {name or 'without a name'} is not supported: Gaudi 2 and Gaudi 3 are")
