"""Run `catenary doctor`: check the host, print the results, and exit with 1 if there is a problem."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from pydantic import Field

from catenary.config import ServiceConfig, settings
from catenary_apps.cli.output import load_options
from catenary_apps.doctor.card_checks import (
    check_cards,
    check_driver,
    check_libfabric,
    check_modules,
    check_numa,
    check_owners,
    check_ports,
    check_smi,
    check_status,
)
from catenary_apps.doctor.hccl import BandwidthOptions, check_bandwidth, has_bridge
from catenary_apps.doctor.host import Host, Survey, command_runner, survey
from catenary_apps.doctor.host_checks import (
    check_compatibility,
    check_governor,
    check_hugepages,
    check_idle_states,
    check_iommu,
    check_limits,
    check_memory,
    check_numa_balancing,
    check_packages,
    check_python,
    check_runtime,
)
from catenary_apps.doctor.result import Result, Status, as_json, not_applicable, show

_NAME = "catenary doctor"


class DoctorConfig(ServiceConfig):
    """Check this host's set-up for Gaudi cards."""

    model_config = settings(prefix="CATENARY_DOCTOR_")

    format: Literal["table", "json"] = Field(
        "table", description="How to print the checks; --json is short for --format json."
    )
    all: bool = Field(False, description="Show the checks that do not apply to this host, too.")
    root: Path = Field(
        Path("/"),
        description="Directory that holds the host's sys, proc, etc, opt and usr: for a container that has "
        "the host's / mounted elsewhere.",
    )
    command_s: float = Field(
        20.0, gt=0, le=600, description="Seconds that a command such as hl-smi may take to answer."
    )
    bandwidth_test: bool = Field(
        True,
        description="With two cards or more that nobody uses, and habana_frameworks: measure an all-reduce "
        "between them. It takes the cards for that long.",
    )
    bandwidth_mib: int = Field(
        256, ge=1, le=16_384, description="Size of the tensor of that all-reduce in MiB."
    )
    bandwidth_s: float = Field(
        180.0, gt=0, le=3_600, description="Seconds that the bandwidth test may take in all."
    )


@dataclass(frozen=True, slots=True)
class Check:
    """A check and its name. `without_cards`: why it does not apply to a host that has none; None: it does."""

    name: str
    run: Callable[[Survey], Result]
    without_cards: str | None = None

    def __call__(self, survey: Survey) -> Result:
        skipped = self.without_cards is not None and not survey.cards
        result = not_applicable(self.without_cards or "") if skipped else self.run(survey)
        return replace(result, check=self.name)


CHECKS = (
    Check("cards", check_cards),
    Check("driver", check_driver, without_cards="no card to drive"),
    Check("card status", check_status),
    Check("hl-smi", check_smi, without_cards="no card to ask about"),
    Check("card owners", check_owners),
    Check("module ids", check_modules, without_cards="no card"),
    Check("NUMA nodes of cards", check_numa, without_cards="no card"),
    Check("packages", check_packages),
    Check("Python", check_python),
    Check("driver and software", check_compatibility, without_cards="no driver to compare"),
    Check("huge pages", check_hugepages, without_cards="no card needs them"),
    Check("CPU governor", check_governor),
    Check("C-states", check_idle_states),
    Check("NUMA balancing", check_numa_balancing),
    Check("IOMMU", check_iommu, without_cards="no card"),
    Check("memory", check_memory),
    Check("limits", check_limits),
    Check("NIC ports", check_ports),
    Check("libfabric", check_libfabric, without_cards="no card"),
    Check("container runtime", check_runtime, without_cards="no card to give to containers"),
)


def run_doctor(argv: Sequence[str]) -> int:
    """Run `catenary doctor`: 0 if there is no problem, 1 if there is one, 2 for wrong options."""
    config = load_options(DoctorConfig, argv, prog=_NAME)
    if not config.root.is_dir():
        print(f"{_NAME}: --root {config.root} is not a directory", file=sys.stderr)
        return 2
    results = examine(config, Host(root=config.root, run=command_runner(config.command_s)))
    if config.format == "json":
        print(as_json(results))
    else:
        from rich.console import Console

        show(results, Console(), hidden=not config.all)
    return 1 if any(result.status is Status.PROBLEM for result in results) else 0


def examine(config: DoctorConfig, host: Host) -> list[Result]:
    """Run all checks of a host, in the order in which they are shown."""
    found = survey(host)
    results = [check(found) for check in CHECKS]
    if config.bandwidth_test:
        options = BandwidthOptions(config.bandwidth_mib, config.bandwidth_s)
        bandwidth = partial(check_bandwidth, options=options, bridge=has_bridge())
        results.append(Check("bandwidth", bandwidth)(found))
    return results
