"""The options of `catenary doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from catenary.config import ServiceConfig, settings


class DoctorConfig(ServiceConfig):
    """What to look at, and how to say it."""

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
