"""An HPU that computes on the CPU and keeps the hardware's rules: `--device sim`, and tests."""

from __future__ import annotations

from services.engine.device.sim.card import Card, card, reset
from services.engine.device.sim.habana import hpu
from services.engine.device.sim.habana.package import install_package
from services.engine.device.sim.registration import register
from services.engine.device.sim.settings import SimError, SimSettings
from services.engine.device.sim.tensor import SimTensor

__all__ = ["Card", "SimError", "SimSettings", "SimTensor", "card", "install", "reset"]


def install(settings: SimSettings | None = None) -> Card:
    """Makes torch know the device `hpu` and puts the vendor's package in place, with a new card.

    The settings are those of CATENARY_SIM unless given. Raises ValueError for nonsense in it.
    """
    there = reset(settings)
    register(hpu)
    install_package()
    return there
