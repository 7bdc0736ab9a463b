"""`python -m services.engine`: one engine process."""

from __future__ import annotations

import os

from catenary.config import unknown_variables
from catenary.devices import described
from catenary.migration import load_moved
from catenary.runtime import run
from catenary.telemetry import configure_logging, configure_tracing, get_logger
from services.engine.app import serve
from services.engine.config import EngineConfig

log = get_logger("services.engine")


def main() -> None:
    """Read the options and serve until a signal comes."""
    config, warnings = load_moved(EngineConfig, None, prog="services.engine")
    configure_logging(level=config.log_level, fmt=config.log_format, service="engine")
    configure_tracing("engine")
    for line in (*warnings, *unknown_variables(os.environ, ["CATENARY_ENGINE_"])):
        log.warning(line)
    if chosen := described(config.device):
        log.info(chosen)
    run(lambda stop: serve(config, stop))


if __name__ == "__main__":
    main()
