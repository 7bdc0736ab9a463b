"""The fleet: attached engines, their leases and loads, the models they serve. Pure."""

from __future__ import annotations

from services.router.fleet.engine import Engine
from services.router.fleet.registry import Fleet

__all__ = ["Engine", "Fleet"]
