"""`catenary up`: the supervisor of a deployment on one machine."""

from __future__ import annotations

from catenary_apps.up.config import UpConfig
from catenary_apps.up.run import run_up

__all__ = ["UpConfig", "run_up"]
