"""`habana_frameworks.torch.core` (gaudi-facts.md 4.1)."""

from __future__ import annotations

from typing import Any

from catenary.telemetry import get_logger
from services.engine.device.sim.card import card

log = get_logger(__name__)

_warned = False


def mark_step(device_str: str = "", sync: bool = False) -> None:
    """End what lazy mode has collected. Anywhere else it does nothing, and says so once."""
    global _warned
    there = card()
    if not there.lazy:
        if not _warned:
            log.warning("mark_step does nothing outside of lazy mode")
            _warned = True
        return
    there.counters.mark_steps += 1
    there.flush()
    for capture in there.recorders:
        capture.mark_step()
    if sync:
        there.synchronize()


def hpu_inference_set_env() -> None:
    """Prepare constant folding for inference; has nothing to fold here."""


def hpu_initialize(model: Any = None, mark_only_scales_as_const: bool = False) -> None:
    """Mark a model's constants; has nothing to fold here."""
