"""Placement: one file per policy. Pure."""

from __future__ import annotations

from services.router.placement.consistent_hash import ConsistentHash
from services.router.placement.cost import Cost
from services.router.placement.least_loaded import LeastLoaded
from services.router.placement.placer import AnyPlacer, HalvesPlacer, Placed, Placer
from services.router.placement.policy import (
    POLICIES,
    Candidates,
    Choice,
    Memory,
    PlacementOptions,
    PlacementPolicy,
    policy_named,
    register,
)
from services.router.placement.power_of_two import PowerOfTwo
from services.router.placement.prefix_approximate import PrefixApproximate
from services.router.placement.prefix_exact import PrefixExact
from services.router.placement.prefixes import Matched, Prefixes
from services.router.placement.receipt import Candidate, Receipt, ReceiptBook
from services.router.placement.request import BlockNames, Half, PlacementRequest, placement_request
from services.router.placement.round_robin import RoundRobin
from services.router.placement.session_affinity import SessionAffinity

__all__ = [
    "POLICIES",
    "AnyPlacer",
    "BlockNames",
    "Candidate",
    "Candidates",
    "Choice",
    "ConsistentHash",
    "Cost",
    "Half",
    "HalvesPlacer",
    "LeastLoaded",
    "Matched",
    "Memory",
    "Placed",
    "PlacementOptions",
    "PlacementPolicy",
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
    "placement_request",
    "policy_named",
    "register",
]
