"""`python -m services.engine`: one engine process."""

from __future__ import annotations

from catenary.config import load
from catenary.runtime import run
from catenary.telemetry import configure_logging
from services.engine.app import serve
from services.engine.config import EngineConfig


def main() -> None:
    """Read the options and serve until a signal comes."""
    config = load(EngineConfig, None, prog="services.engine")
    configure_logging(level=config.log_level, fmt=config.log_format, service="engine")
    run(lambda stop: serve(config, stop))


if __name__ == "__main__":
    main()
