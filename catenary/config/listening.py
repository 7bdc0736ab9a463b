"""Options of a service that listens for gRPC. Imports no gRPC: an engine's core reads them too."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from pydantic import Field, field_validator

from catenary.addresses import parse_address
from catenary.config.settings import Expert, ServiceConfig, settings

CLIENT_SECRET_ENV = "CATENARY_CLIENT_SECRET"
ENGINE_SECRET_ENV = "CATENARY_ENGINE_SECRET"


class ListenOptions(ServiceConfig):
    """Addresses, secrets, TLS and limits of a service that listens for gRPC."""

    model_config = settings("CATENARY_")

    headings: ClassVar[Mapping[str, str]] = {
        "listen": "gRPC: addresses, secrets, TLS",
        "max_message_mib": Expert("gRPC: limits of messages, calls and connections"),
        "metrics_host": "Metrics",
    }

    listen: tuple[str, ...] = Field(
        ("127.0.0.1:7070",),
        min_length=1,
        max_length=16,
        description="Addresses to listen on: HOST:PORT, [IPV6]:PORT or unix:/PATH; port 0 takes a free one.",
    )
    client_secret_file: Path | None = Field(
        None,
        description=f"File with the clients' secret on one line; without it ${CLIENT_SECRET_ENV} counts.",
    )
    engine_secret_file: Path | None = Field(
        None,
        description=f"File with the engines' secret on one line; without it ${ENGINE_SECRET_ENV} counts.",
    )
    insecure: bool = Field(False, description="Serve anyone, with no secret and no client certificates.")
    tls_cert: Path | None = Field(None, description="PEM certificate chain; turns TLS on for TCP addresses.")
    tls_key: Path | None = Field(None, description="PEM key of the certificate.")
    tls_ca: Path | None = Field(
        None, description="PEM authorities that the peer's certificate must come from."
    )
    tls_require_client_cert: bool = Field(False, description="Mutual TLS: clients must show a certificate.")
    max_message_mib: int = Field(64, ge=1, le=1024, description="Largest gRPC message, in MiB.")
    max_concurrent_streams: int = Field(1024, ge=1, le=65536, description="Concurrent calls per connection.")
    max_calls: int = Field(4096, ge=1, le=1_000_000, description="Concurrent calls of all connections.")
    keepalive_s: float = Field(
        30, ge=0.1, le=3600, description="Seconds between pings on a quiet connection."
    )
    max_connection_age_s: float = Field(
        0,
        ge=0,
        le=86400,
        description="Seconds after which clients must reconnect and resolve names anew; 0: never.",
    )
    drain_s: float = Field(30, ge=0, le=3600, description="Seconds that running work may take at shutdown.")
    metrics_host: str = Field("127.0.0.1", min_length=1, description="Address of the Prometheus page.")
    metrics_port: int = Field(0, ge=0, le=65535, description="Port of the Prometheus page; 0: none.")

    @field_validator("listen")
    @classmethod
    def _addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            parse_address(text)
        return value
