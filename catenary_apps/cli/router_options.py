"""The options of commands that speak to routers."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from catenary.config import ServiceConfig


class RouterAccess(ServiceConfig):
    """How to show that one may speak to a router."""

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


class RouterOptions(RouterAccess):
    """Which router, and how to show that one may speak to it."""

    router: str | None = Field(
        None,
        min_length=1,
        description="Address of a router (HOST:PORT or unix:PATH). Absent: that of the catenary up that runs "
        "on this machine.",
    )


class RoutersOptions(RouterAccess):
    """Which routers, and how to show that one may speak to them."""

    router: tuple[str, ...] = Field(
        (),
        max_length=256,
        description="Addresses of routers (HOST:PORT or unix:PATH); a name stands for all that it resolves "
        "to, now and later. Absent: that of the catenary up that runs on this machine.",
    )
    timeout: float = Field(
        3.0, gt=0, le=60, description="Seconds that a router may take to answer; then it is shown as away."
    )
