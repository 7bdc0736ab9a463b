"""The options of `catenary fleet`."""

from __future__ import annotations

from catenary.cli.router_options import RoutersOptions
from catenary.config import settings


class FleetConfig(RoutersOptions):
    """Which routers to ask."""

    model_config = settings(prefix="CATENARY_FLEET_")
