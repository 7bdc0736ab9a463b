"""A simulated fleet: scripted engines in virtual time behind the router's own fleet, index and policies."""

from __future__ import annotations

from benchmarks.fleet.fleet import TRAFFIC, Arrival, FleetPlan, FleetRun, Outcome

__all__ = ["TRAFFIC", "Arrival", "FleetPlan", "FleetRun", "Outcome"]
