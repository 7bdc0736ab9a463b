"""`habana_frameworks.torch.utils.experimental` (gaudi-facts.md 4.3)."""

from __future__ import annotations

from enum import Enum

from services.engine.device.sim.card import card


class synDeviceType(Enum):
    """The kinds of card."""

    synDeviceGaudi2 = 4
    synDeviceGaudi3 = 5


def _get_device_type() -> synDeviceType:
    return {"gaudi2": synDeviceType.synDeviceGaudi2, "gaudi3": synDeviceType.synDeviceGaudi3}[
        card().settings.device
    ]
