"""Run `catenary drain`: tell the router, then wait until the engine has left, and show progress."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from typing import ClassVar

from pydantic import Field

from catenary.config import settings
from catenary.runtime import StartRefused
from catenary_apps.cli.output import load_options, refused
from catenary_apps.cli.router_options import RouterOptions

_NAME = "catenary drain"
_INTERRUPTED = 130
_POLL_S = 0.2
# What an engine may take beyond a deadline to say goodbye.
_MARGIN_S = 30.0


class DrainConfig(RouterOptions):
    """Which engine is to end, and how long it may take."""

    model_config = settings(prefix="CATENARY_DRAIN_")

    positional: ClassVar[str] = "engine"

    engine: str = Field(
        min_length=1,
        max_length=256,
        description="Engine: its name (all engines of that name) or its instance id, as catenary fleet shows "
        "them. It may stand without --engine.",
    )
    deadline: float | None = Field(
        None,
        ge=0,
        le=86_400,
        description="Seconds that running sequences get to end; what is left then goes on with another "
        "engine. Absent: the engine's own drain-s.",
    )


def run_drain(argv: Sequence[str]) -> int:
    """Run `catenary drain`: 0 once the engine has left, 1 with one line on stderr if that fails."""
    config = load_options(DrainConfig, argv, prog=_NAME)
    # Not before: a wrong option is to be refused without waiting for gRPC to load.
    from rich.console import Console

    from catenary.rpc import RpcError

    try:
        with Console(stderr=True).status(f"{config.engine}: draining") as status:
            left = asyncio.run(_drain(config, status.update))
    except StartRefused as error:
        return refused(_NAME, error)
    except RpcError as error:
        print(f"{_NAME}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{_NAME}: not waiting any more; {config.engine} drains on", file=sys.stderr)
        return _INTERRUPTED
    if not left:
        print(f"{_NAME}: {config.engine} has not left in time", file=sys.stderr)
        return 1
    print(f"{config.engine} has left; its supervisor decides whether it starts again (catenary up does)")
    return 0


async def _drain(config: DrainConfig, say: Callable[[str], None]) -> bool:
    """Return whether all engines that were told have left in time. Raises RpcError and StartRefused."""
    from catenary.client import AsyncClient
    from catenary_apps.cli.routers import find_router

    target = find_router(config)
    deadline_ms = None if config.deadline is None else round(config.deadline * 1000)
    loop = asyncio.get_running_loop()
    until = None if config.deadline is None else loop.time() + config.deadline + _MARGIN_S
    async with AsyncClient(target.address, secret=target.secret, tls=target.tls) as client:
        draining = set(await client.drain(config.engine, deadline_ms=deadline_ms))
        while until is None or loop.time() < until:
            there = [one for one in (await client.fleet()).engines if one.instance_id in draining]
            if not there:
                return True
            # Other routers' sequences count as well.
            held = sum(max(one.load.running + one.load.waiting, one.placed_sequences) for one in there)
            say(f"{config.engine}: {held} sequences left")
            await asyncio.sleep(_POLL_S)
    return False
