"""`python -m gateway`."""

from __future__ import annotations

import asyncio
import os

import catenary.grpc_environment  # noqa: F401
from catenary.config import load, unknown_variables
from catenary.runtime import mark_started, run
from catenary.telemetry import configure_logging, configure_tracing, get_logger
from gateway.app import GatewayApp
from gateway.config import GatewayConfig

log = get_logger("gateway")


async def serve(config: GatewayConfig, stop: asyncio.Event) -> None:
    """Run a gateway until `stop` is set."""
    configure_logging(level=config.log_level, fmt=config.log_format, service="gateway")
    configure_tracing("gateway")
    for line in unknown_variables(os.environ, ["CATENARY_GATEWAY_"]):
        log.warning(line)
    app = GatewayApp(config)
    await app.start()
    mark_started()
    stopped = asyncio.ensure_future(stop.wait())
    failed = asyncio.ensure_future(app.failed())
    await asyncio.wait({stopped, failed}, return_when=asyncio.FIRST_COMPLETED)
    for waiting in (stopped, failed):
        waiting.cancel()
    await app.stop()
    if failed.done() and not failed.cancelled():
        failed.result()


def main() -> None:
    """Run the process."""
    config = load(GatewayConfig, None, prog="python -m gateway")
    run(lambda stop: serve(config, stop))


if __name__ == "__main__":
    main()
