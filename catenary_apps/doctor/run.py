"""`catenary doctor`: looks, says, and exits with 1 if there is a problem."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from catenary_apps.cli.output import load_options
from catenary_apps.doctor.checks import CHECKS
from catenary_apps.doctor.config import DoctorConfig
from catenary_apps.doctor.hccl import BandwidthOptions, check_bandwidth, has_bridge
from catenary_apps.doctor.host import Host, command_runner
from catenary_apps.doctor.result import Result, Status
from catenary_apps.doctor.survey import survey

_NAME = "catenary doctor"


def run_doctor(argv: Sequence[str]) -> int:
    """Run `catenary doctor`: 0 if there is no problem, 1 if there is one, 2 for wrong options."""
    config = load_options(DoctorConfig, argv, prog=_NAME)
    if not config.root.is_dir():
        print(f"{_NAME}: --root {config.root} is not a directory", file=sys.stderr)
        return 2
    results = examine(config, Host(root=config.root, run=command_runner(config.command_s)))
    # Not before: rich takes a while to load, and JSON needs none of it.
    from catenary_apps.doctor.show import as_json, show

    if config.format == "json":
        print(as_json(results))
    else:
        from rich.console import Console

        show(results, Console(), hidden=not config.all)
    return 1 if any(result.status is Status.PROBLEM for result in results) else 0


def examine(config: DoctorConfig, host: Host) -> list[Result]:
    """All checks of a host, in the order in which they are shown."""
    found = survey(host)
    results = [check(found) for check in CHECKS]
    if config.bandwidth_test:
        options = BandwidthOptions(config.bandwidth_mib, config.bandwidth_s)
        results.append(check_bandwidth(found, options, bridge=has_bridge()))
    return results
