"""`habana_frameworks.torch.utils.internal` (gaudi-facts.md 4.1)."""

from __future__ import annotations

from services.engine.device.sim.card import card


def is_lazy() -> bool:
    """Return whether operations are collected until `mark_step`."""
    return card().lazy
