"""The options of `catenary top`."""

from __future__ import annotations

from pydantic import Field

from catenary.config import settings
from catenary_apps.cli.router_options import RoutersOptions


class TopConfig(RoutersOptions):
    """Which routers to watch, and how often."""

    model_config = settings(prefix="CATENARY_TOP_")

    interval: float = Field(1.0, ge=0.1, le=3_600, description="Seconds between two frames.")
    once: bool = Field(False, description="Print one frame and end.")
