"""The device `hpu`. Importing this imports nothing of Habana's."""

from __future__ import annotations

from services.engine.device.hpu.bridge import prepare_environment
from services.engine.device.hpu.device import HpuDevice
from services.engine.device.hpu.open_card import open_hpu
from services.engine.device.hpu.settings import (
    GAUDI2,
    GAUDI3,
    AttentionSettings,
    HpuSettings,
    RecipeCache,
    Softmax,
    StepLog,
    properties_of,
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
    "open_hpu",
    "prepare_environment",
    "properties_of",
]
