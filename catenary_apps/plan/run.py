"""`catenary plan`: plans, prints, draws."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence

from catenary.runtime import StartRefused
from catenary_apps.cli.output import refused
from catenary_apps.cli.pictures import check_picture, write_picture
from catenary_apps.migration.launch import ENGINE as ENGINE_PREFIX
from catenary_apps.plan.config import PlanConfig
from services.engine.vllm_variables import load_shared

_NAME = "catenary plan"
# An engine's device is a kind of device, a plan's a card; logs are each program's own.
_NOT_SHARED = ("device", "log_level", "log_format")


def run_plan(argv: Sequence[str]) -> int:
    """Run `catenary plan`; 2 with one line on stderr for what cannot be done or does not fit."""
    words = ["--format=json" if word == "--json" else word for word in argv]
    found_options = load_shared(PlanConfig, words, prog=_NAME, prefix=ENGINE_PREFIX, apart=_NOT_SHARED)
    config = found_options.config
    for line in found_options.warnings:
        print(f"warning: {line}", file=sys.stderr)
    # Not before: a wrong option is to be refused without waiting for the engine's packages.
    from catenary_apps.plan.planning import make_plan
    from catenary_apps.plan.report import as_json, as_table, draw

    try:
        if config.plot is not None:
            check_picture(config.plot, "--plot")
        found = make_plan(config, found_options.origins)
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        print(as_json(found) if config.format == "json" else as_table(found, width=width))
        if config.plot is not None:
            write_picture(config.plot, draw(found), "--plot")
    except (StartRefused, ValueError) as error:
        return refused(_NAME, error)
    return 0
