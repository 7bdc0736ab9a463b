"""`python -m benchmarks.overhead.played_engine`: the real servicer over a played core.

The variable PLAYED holds the JSON of `played_core.Played`; flags are those of the engine.
"""

from __future__ import annotations

import asyncio
import os
import sys

import catenary.grpc_environment  # noqa: F401
from catenary.config import load
from catenary.runtime import mark_started, run
from services.engine.app import EngineApp
from services.engine.config import EngineConfig
from services.engine.servicer import Core, ProcessCore, spawn_process

PLAYED = "PLAYED"
_COMMAND = (sys.executable, "-m", "benchmarks.overhead.played_core")


async def serve(config: EngineConfig, stop: asyncio.Event) -> None:
    """Run an engine until `stop` is set."""

    def core(_restart: bool) -> Core:
        return ProcessCore(os.environ[PLAYED].encode(), stop_s=1.0, spawn=spawn_process(None, _COMMAND))

    app = EngineApp(config, core_factory=core)
    await app.start()
    mark_started()
    await stop.wait()
    await app.stop(0.0)


def main() -> None:
    """The process."""
    config = load(EngineConfig, None, prog="played_engine")
    run(lambda stop: serve(config, stop))


if __name__ == "__main__":
    main()
