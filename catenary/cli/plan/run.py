"""`catenary plan`: plans, prints, draws."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from catenary.cli.output import load_options, write_file
from catenary.cli.plan.config import PlanConfig

_NAME = "catenary plan"


def run_plan(argv: Sequence[str]) -> int:
    """Run `catenary plan`; 2 with one line on stderr for what cannot be done or does not fit."""
    config = load_options(PlanConfig, argv, prog=_NAME)
    # Not before: a wrong option is to be refused without waiting for the engine's packages.
    from catenary.cli.plan.document import as_json
    from catenary.cli.plan.picture import draw
    from catenary.cli.plan.planning import make_plan
    from catenary.cli.plan.show import as_table

    try:
        found = make_plan(config)
        print(as_json(found) if config.format == "json" else as_table(found))
        if config.plot is not None:
            write_file(config.plot, draw(found, config.plot.suffix.lower()), "--plot")
    except ValueError as error:
        print(f"{_NAME}: {error}", file=sys.stderr)
        return 2
    return 0
