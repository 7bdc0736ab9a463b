"""`catenary vllm-serve`: takes the command line of `vllm serve` and starts `catenary up`."""

from __future__ import annotations

import os
from collections.abc import Sequence

from catenary.config import ConfigError
from catenary_apps.cli.launching import COMMON_HELP, asks_for_help, help_of, start
from catenary_apps.migration import SERVE_GROUPS, UP_PREFIX, Kind, Launch, ServeOption, parse_serve

PROGRAM = "catenary vllm-serve"
USAGE = f"""\
usage: catenary vllm-serve MODEL [OPTIONS OF vllm serve] [--dry-run] [-- OPTIONS OF catenary up]

Starts catenary up with what the options of vllm serve ask for. Each is listed with what stands for it here;
docs/migration.md has the same with vLLM's variables.

{COMMON_HELP}  --config FILE
      YAML file of options of vllm serve; those of the command line win
"""
_VALUES = {Kind.VALUE: " VALUE", Kind.FLAG: "", Kind.WORDS: " VALUE ..."}


def run_vllm_serve(argv: Sequence[str]) -> int:
    """Run `catenary vllm-serve`; the exit code is that of `catenary up`, 2 for a wrong command line."""
    if asks_for_help(argv):
        groups = {
            heading: [(_written(option), option.row) for option in group]
            for heading, group in SERVE_GROUPS.items()
        }
        print(f"{USAGE}\n{help_of(groups)}", end="")
        return 0

    def make(words: list[str]) -> Launch:
        launch = Launch()
        parse_serve(words, launch)
        if not launch.asked(f"{UP_PREFIX}MODEL"):
            raise ConfigError("a model is missing: a directory or an id")
        if not launch.asked(f"{UP_PREFIX}HOST") and not os.environ.get(f"{UP_PREFIX}HOST"):
            launch.notes.append("listening on this machine alone; --host 0.0.0.0 is vLLM's default")
        return launch

    return start(PROGRAM, argv, make)


def _written(option: ServeOption) -> str:
    return ", ".join(option.names) + _VALUES[option.kind]
