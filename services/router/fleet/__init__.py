"""The fleet: attached engines, their leases, loads and breakers, the models they serve. Pure."""

from __future__ import annotations

from services.router.fleet.breaker import Breaker, BreakerOptions, BreakerState
from services.router.fleet.engine import Engine
from services.router.fleet.registry import EngineColumns, Fleet, has_room

__all__ = ["Breaker", "BreakerOptions", "BreakerState", "Engine", "EngineColumns", "Fleet", "has_room"]
