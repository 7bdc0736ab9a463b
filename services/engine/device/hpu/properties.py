"""The kinds of card.

Source: docs/gaudi-facts.md 4.3.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.engine.device.base import DeviceError


@dataclass(frozen=True, slots=True)
class HpuProperties:
    """One kind of card, by the name that the driver gives it."""

    name: str


GAUDI2 = HpuProperties("GAUDI2")
GAUDI3 = HpuProperties("GAUDI3")


def properties_of(name: str) -> HpuProperties:
    """The kind of card that the driver calls `name`. Raises DeviceError for the first generation."""
    plain = name.upper().replace(" ", "").replace("-", "")
    for known in (GAUDI2, GAUDI3):
        # Variants carry a letter more: GAUDI2E, GAUDI2D.
        if plain.startswith(known.name):
            return known
    raise DeviceError(f"the card {name or 'without a name'} is not supported: Gaudi 2 and Gaudi 3 are")
