"""`catenary fleet`: asks, prints one JSON object."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from catenary.runtime import StartRefused
from catenary_apps.cli.fleet.config import FleetConfig
from catenary_apps.cli.output import load_options

if TYPE_CHECKING:
    from catenary_apps.cli.router_polling import RouterView

_NAME = "catenary fleet"


def run_fleet(argv: Sequence[str]) -> int:
    """Run `catenary fleet`: 1 if a router does not answer (it is in the JSON), 2 for wrong options."""
    config = load_options(FleetConfig, argv, prog=_NAME)
    # Not before: a wrong option is to be refused without waiting for gRPC to load.
    from catenary_apps.cli.fleet.document import fleet_document

    try:
        views = asyncio.run(_ask(config))
    except StartRefused as error:
        print(f"{_NAME}: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(fleet_document(views), indent=2))
    away = [view for view in views if view.fleet is None]
    for view in away:
        print(f"{_NAME}: {view.address}: {view.error}", file=sys.stderr)
    return 1 if away else 0


async def _ask(config: FleetConfig) -> list[RouterView]:
    from catenary_apps.cli.router_polling import RouterPoller
    from catenary_apps.cli.router_target import find_routers

    async with RouterPoller(find_routers(config), timeout_s=config.timeout) as poller:
        return await poller.poll()
