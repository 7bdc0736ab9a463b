"""The options of commands that speak to a router."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from catenary.config import ServiceConfig


class RouterOptions(ServiceConfig):
    """Which router, and how to show that one may speak to it."""

    router: str | None = Field(
        None,
        min_length=1,
        description="Address of a router (HOST:PORT or unix:PATH). Absent: that of the catenary up that runs "
        "on this machine.",
    )
    client_secret_file: Path | None = Field(
        None,
        description="File with the clients' secret on one line; without it $CATENARY_CLIENT_SECRET counts. "
        "Not needed for a catenary up of yours.",
    )
    tls_ca: Path | None = Field(
        None, description="PEM authorities of the router's certificate; turns TLS on."
    )
    tls_cert: Path | None = Field(None, description="PEM certificate to show to the router.")
    tls_key: Path | None = Field(None, description="PEM key of that certificate.")
