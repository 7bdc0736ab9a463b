"""Placement: one file per policy. Pure."""

from __future__ import annotations

from services.router.placement.least_loaded import LeastLoaded
from services.router.placement.placer import Placer
from services.router.placement.policy import (
    POLICIES,
    PlacementPolicy,
    PlacementRequest,
    policy_named,
    register,
)

__all__ = [
    "POLICIES",
    "LeastLoaded",
    "PlacementPolicy",
    "PlacementRequest",
    "Placer",
    "policy_named",
    "register",
]
