"""`python -m services.engine`: one engine process."""

from __future__ import annotations

import catenary.grpc_environment  # noqa: F401
from services.engine.app import EngineApp, run_engine
from services.engine.config import EngineConfig
from services.engine.vllm_variables import load_moved


def main() -> None:
    """Read the options and serve until a signal comes."""
    config, warnings = load_moved(EngineConfig, None, prog="services.engine")
    run_engine(config, warnings, EngineApp)


if __name__ == "__main__":
    main()
