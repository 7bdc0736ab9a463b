"""Executes the scheduler's plans on a device."""

from __future__ import annotations

from services.engine.runner.batches import KvLayout
from services.engine.runner.copies import BlockCopies, host_bytes
from services.engine.runner.runner import LaunchedStep, PlanError, Runner, StepResult
from services.engine.runner.tail import TokenScore

__all__ = [
    "BlockCopies",
    "KvLayout",
    "LaunchedStep",
    "PlanError",
    "Runner",
    "StepResult",
    "TokenScore",
    "host_bytes",
]
