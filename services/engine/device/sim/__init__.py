"""An HPU that computes on the CPU and keeps the hardware's rules: `--device sim`, and tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from services.engine.device.base import Device, ExecutionMode
from services.engine.device.hpu import HpuSettings, hpu_settings, open_hpu, prepare_environment
from services.engine.device.sim.card import Card, card, reset
from services.engine.device.sim.habana import hpu
from services.engine.device.sim.habana.package import install_package
from services.engine.device.sim.registration import register
from services.engine.device.sim.settings import SimError, SimSettings
from services.engine.device.sim.tensor import SimTensor

if TYPE_CHECKING:
    from services.engine.options import EngineOptions

__all__ = [
    "Card",
    "SimError",
    "SimSettings",
    "SimTensor",
    "card",
    "install",
    "open_device",
    "open_sim",
    "reset",
]


def install(settings: SimSettings | None = None) -> Card:
    """Register the device `hpu` with torch, for good, and put the vendor's package in place, with a new card.

    The settings are those of CATENARY_SIM unless given. Raises ValueError for nonsense in it.
    """
    there = reset(settings)
    register(hpu)
    install_package()
    return there


def open_sim(mode: ExecutionMode, settings: HpuSettings | None = None) -> Device:
    """Open a simulated card as `hpu` opens one: the environment is read once, before. Raises DeviceError."""
    prepare_environment(mode)
    install()
    return open_hpu(mode, settings or HpuSettings())


def open_device(options: EngineOptions, mode: ExecutionMode) -> Device:
    """Open the simulated card of an engine; it computes on torch's threads. Raises DeviceError."""
    if options.device_threads:
        torch.set_num_threads(options.device_threads)
    return open_sim(mode, hpu_settings(options))
