"""`python -m catenary_testing.engine`: one scripted engine process."""

from __future__ import annotations

from catenary_testing.engine.app import ScriptedEngineApp, ScriptedEngineConfig
from services.engine.app import run_engine
from services.engine.vllm_variables import load_moved


def main() -> None:
    """Read the options and serve until a signal comes."""
    config, warnings = load_moved(ScriptedEngineConfig, None, prog="catenary_testing.engine")
    run_engine(config, warnings, ScriptedEngineApp)


if __name__ == "__main__":
    main()
