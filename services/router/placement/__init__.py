"""Placement: one file per policy. Pure."""

from __future__ import annotations

from services.router.placement.least_loaded import LeastLoaded
from services.router.placement.placer import Placed, Placer
from services.router.placement.policy import (
    POLICIES,
    Choice,
    PlacementPolicy,
    policy_named,
    register,
)
from services.router.placement.receipt import Candidate, Receipt, ReceiptBook
from services.router.placement.request import BlockNames, PlacementRequest, placement_request

__all__ = [
    "POLICIES",
    "BlockNames",
    "Candidate",
    "Choice",
    "LeastLoaded",
    "Placed",
    "PlacementPolicy",
    "PlacementRequest",
    "Placer",
    "Receipt",
    "ReceiptBook",
    "placement_request",
    "policy_named",
    "register",
]
