"""`habana_frameworks.torch.hpex.normalization` (gaudi-facts.md 4.5)."""

from __future__ import annotations

from typing import Any

from services.engine.device.sim.card import card
from services.engine.device.sim.hpex import norm


def __getattr__(name: str) -> Any:
    if name == "FusedRMSNorm" and not card().settings.missing & {"FusedRMSNorm", "rms_norm"}:
        return norm.FusedRMSNorm
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
