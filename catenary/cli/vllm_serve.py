"""`catenary vllm-serve`: takes the command line of `vllm serve` and starts `catenary up`."""

from __future__ import annotations

import os
from collections.abc import Sequence

from catenary.cli.launching import start, table
from catenary.config import ConfigError
from catenary.migration import SERVE_OPTIONS, UP_PREFIX, Launch, parse_serve

PROGRAM = "catenary vllm-serve"
USAGE = """\
usage: catenary vllm-serve MODEL [OPTIONS OF vllm serve] [--dry-run]

Starts catenary up with what the options of vllm serve ask for. --dry-run only says how.

"""


def run_vllm_serve(argv: Sequence[str]) -> int:
    """Run `catenary vllm-serve`; the exit code is that of `catenary up`, 2 for a wrong command line."""
    words = list(argv)
    if "--help" in words or "-h" in words:
        print(USAGE + table(option.row for option in SERVE_OPTIONS), end="")
        return 0
    dry = "--dry-run" in words

    def make() -> Launch:
        launch = Launch()
        parse_serve([word for word in words if word != "--dry-run"], launch)
        if not launch.asked(f"{UP_PREFIX}MODEL"):
            raise ConfigError("a model is missing: a directory or an id")
        if not launch.asked(f"{UP_PREFIX}HOST") and not os.environ.get(f"{UP_PREFIX}HOST"):
            launch.notes.append("listening on this machine alone; --host 0.0.0.0 is vLLM's default")
        return launch

    return start(PROGRAM, make, dry=dry)
