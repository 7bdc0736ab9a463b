"""`catenary plan`: what an engine would do with a model on a card, without having either."""

from __future__ import annotations

from catenary.cli.plan.cards import CARDS
from catenary.cli.plan.config import PlanConfig
from catenary.cli.plan.planning import kv_bytes_on_card
from catenary.cli.plan.run import run_plan

__all__ = ["CARDS", "PlanConfig", "kv_bytes_on_card", "run_plan"]
