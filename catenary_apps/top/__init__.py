"""`catenary top`: the fleet, live in the terminal."""

from __future__ import annotations

from catenary_apps.top.run import TopConfig, run_top

__all__ = ["TopConfig", "run_top"]
