"""The options of `catenary profile`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from catenary.config import ServiceConfig, settings


class ProfileConfig(ServiceConfig):
    """Which engine to profile, for how long, and where the trace goes."""

    model_config = settings(prefix="CATENARY_PROFILE_")

    engine: str | None = Field(
        None,
        min_length=1,
        description="Engine: the address of its status service (HOST:PORT or unix:PATH), or its name under "
        "the catenary up that runs on this machine (engine-1). Absent: that one's engine-0.",
    )
    steps: int = Field(50, ge=1, le=10_000, description="Steps to record.")
    seconds: float = Field(
        60.0,
        gt=0,
        le=3_600,
        description="Timeout in seconds; the steps recorded by then are written.",
    )
    output: Path = Field(
        Path("trace.json.gz"),
        description="File for the trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open; "
        "compressed if its name ends with .gz.",
    )
    device_activities: bool = Field(
        False,
        description="Also record the device's own profiler. It slows the steps down and makes a larger "
        "trace.",
    )
    format: Literal["table", "json"] = Field(
        "table", description="How to print the summary; --json is short for --format json."
    )
    client_secret_file: Path | None = Field(
        None,
        description="File with the clients' secret on one line; without it $CATENARY_CLIENT_SECRET counts. "
        "Not needed for the engines of catenary up.",
    )
    tls_ca: Path | None = Field(
        None, description="PEM authorities of the engine's certificate; turns TLS on."
    )
    tls_cert: Path | None = Field(None, description="PEM certificate to show to the engine.")
    tls_key: Path | None = Field(None, description="PEM key of that certificate.")
