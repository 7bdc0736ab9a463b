"""`catenary plan`: what an engine would do with a model on a card, without having either."""

from __future__ import annotations

from catenary.cli.plan.config import PlanConfig
from catenary.cli.plan.run import run_plan

__all__ = ["PlanConfig", "run_plan"]
