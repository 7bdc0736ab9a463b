"""Executes the scheduler's plans on a device."""

from __future__ import annotations

from services.engine.runner.copies import BlockCopies, host_bytes
from services.engine.runner.launched import LaunchedStep, PlanError, StepResult
from services.engine.runner.layout import KvLayout
from services.engine.runner.prompts import TokenScore
from services.engine.runner.runner import Runner

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
