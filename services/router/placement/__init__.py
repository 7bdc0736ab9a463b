"""Placement: one file per policy. Pure."""

from __future__ import annotations

from services.router.placement.consistent_hash import ConsistentHash
from services.router.placement.cost import Cost
from services.router.placement.least_loaded import LeastLoaded
from services.router.placement.placer import (
    AnyPlacer,
    Placed,
    Placer,
    Receipt,
    ReceiptBook,
    SplitPlacer,
)
from services.router.placement.policy import (
    POLICIES,
    BlockNames,
    Candidates,
    PlacementOptions,
    PlacementRequest,
    Prefixes,
    SplitPart,
    placement_request,
    policy_named,
)
from services.router.placement.power_of_two import PowerOfTwo
from services.router.placement.prefix import PrefixApproximate, PrefixExact
from services.router.placement.round_robin import RoundRobin
from services.router.placement.session_affinity import SessionAffinity

__all__ = [
    "POLICIES",
    "AnyPlacer",
    "BlockNames",
    "Candidates",
    "ConsistentHash",
    "Cost",
    "LeastLoaded",
    "Placed",
    "PlacementOptions",
    "PlacementRequest",
    "Placer",
    "PowerOfTwo",
    "PrefixApproximate",
    "PrefixExact",
    "Prefixes",
    "Receipt",
    "ReceiptBook",
    "RoundRobin",
    "SessionAffinity",
    "SplitPart",
    "SplitPlacer",
    "placement_request",
    "policy_named",
]
