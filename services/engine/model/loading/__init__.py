"""Streams the tensors of safetensors checkpoints into the fused parameters of our own modules."""

from __future__ import annotations

from services.engine.model.loading.checkpoint import Checkpoint
from services.engine.model.loading.loader import WeightLoader
from services.engine.model.loading.placement import Part, Slot
from services.engine.model.loading.rules import Rule

__all__ = ["Checkpoint", "Part", "Rule", "Slot", "WeightLoader"]
