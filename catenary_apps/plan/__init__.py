"""`catenary plan`: what an engine would do with a model on a card, without having either."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from catenary_apps.plan.config import CARDS, PlanConfig
from catenary_apps.plan.run import run_plan

if TYPE_CHECKING:
    from catenary_apps.plan.planning import kv_bytes_on_card

__all__ = ["CARDS", "PlanConfig", "kv_bytes_on_card", "run_plan"]


def __getattr__(name: str) -> Any:
    """Load the planning once it is asked for: a wrong option is refused without it."""
    if name != "kv_bytes_on_card":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from catenary_apps.plan import planning

    return planning.kv_bytes_on_card
