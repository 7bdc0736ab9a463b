"""The options of `catenary fleet`."""

from __future__ import annotations

from catenary.config import settings
from catenary_apps.cli.router_options import RoutersOptions


class FleetConfig(RoutersOptions):
    """Which routers to ask."""

    model_config = settings(prefix="CATENARY_FLEET_")
