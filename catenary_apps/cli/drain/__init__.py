"""`catenary drain`: an engine finishes what it has and ends."""

from __future__ import annotations

from catenary_apps.cli.drain.config import DrainConfig
from catenary_apps.cli.drain.run import run_drain

__all__ = ["DrainConfig", "run_drain"]
