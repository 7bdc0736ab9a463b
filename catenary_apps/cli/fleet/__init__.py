"""`catenary fleet`: engines, lanes and routers as JSON."""

from __future__ import annotations

from catenary_apps.cli.fleet.config import FleetConfig
from catenary_apps.cli.fleet.run import run_fleet

__all__ = ["FleetConfig", "run_fleet"]
