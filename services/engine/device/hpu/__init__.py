"""The device `hpu`. Importing this imports nothing of Habana's."""

from __future__ import annotations

from services.engine.device.hpu.bridge import prepare_environment
from services.engine.device.hpu.device import HpuDevice
from services.engine.device.hpu.open_card import open_device, open_hpu
from services.engine.device.hpu.settings import (
    GAUDI2,
    GAUDI3,
    AttentionSettings,
    HpuSettings,
    RecipeCache,
    Softmax,
    StepLog,
    hpu_settings,
    properties_of,
    warn_idle,
)

__all__ = [
    "GAUDI2",
    "GAUDI3",
    "AttentionSettings",
    "HpuDevice",
    "HpuSettings",
    "RecipeCache",
    "Softmax",
    "StepLog",
    "hpu_settings",
    "open_device",
    "open_hpu",
    "prepare_environment",
    "properties_of",
    "warn_idle",
]
