"""Executes the scheduler's plans on a device."""

from __future__ import annotations

from services.engine.runner.batches import KvLayout
from services.engine.runner.memory import InsufficientMemory, KvPlan, plan_kv
from services.engine.runner.runner import PlanError, Runner, StepResult

__all__ = ["InsufficientMemory", "KvLayout", "KvPlan", "PlanError", "Runner", "StepResult", "plan_kv"]
