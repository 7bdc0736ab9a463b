"""The options of a service's gRPC side: addresses, secrets, TLS files, limits."""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import grpc
from pydantic import Field, field_validator

from catenary.addresses import parse_address
from catenary.config import ConfigError, ServiceConfig, settings

# A chain of certificates has a few kilobytes.
MAX_PEM_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of one side of a link.

    A server needs cert and key, and ca when it asks clients for certificates. A client needs nothing to trust
    the system's authorities, ca to trust its own, cert and key to show a certificate.
    """

    cert: Path | None
    key: Path | None
    ca: Path | None
    require_client_cert: bool = False


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Credentials of a listening side.

    Raises:
        StartRefused: a file is missing, not PEM, or the key does not belong to the certificate.
    """
    if files.cert is None or files.key is None:
        raise ConfigError("TLS needs both tls_cert and tls_key")
    if files.require_client_cert and files.ca is None:
        raise ConfigError(
            "tls_require_client_cert needs tls_ca, the authority that signs client certificates"
        )
    chain, key, ca = _read_all(files)
    return grpc.ssl_server_credentials(
        [(key or b"", chain or b"")], root_certificates=ca, require_client_auth=files.require_client_cert
    )


def channel_credentials(files: TlsFiles) -> grpc.ChannelCredentials:
    """Credentials of a dialling side. Raises StartRefused like `server_credentials`."""
    if (files.cert is None) is not (files.key is None):
        raise ConfigError("a client certificate needs both tls_cert and tls_key")
    chain, key, ca = _read_all(files)
    return grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=chain)


def _read_all(files: TlsFiles) -> tuple[bytes | None, bytes | None, bytes | None]:
    chain, key, ca = (
        _read("tls_cert", files.cert),
        _read("tls_key", files.key),
        _read("tls_ca", files.ca),
    )
    # gRPC reports bad material on stderr in its own words, or at the first handshake: check it here.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        if files.cert is not None and files.key is not None:
            context.load_cert_chain(files.cert, files.key, password="")
    except (ssl.SSLError, ValueError, OSError):
        raise ConfigError(f"tls_cert {files.cert} and tls_key {files.key} are not a PEM pair") from None
    try:
        if files.ca is not None:
            context.load_verify_locations(files.ca)
    except (ssl.SSLError, OSError):
        raise ConfigError(f"tls_ca {files.ca} holds no PEM certificate") from None
    return chain, key, ca


def _read(option: str, path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            data = file.read(MAX_PEM_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error.strerror or 'cannot be read'}") from None
    if len(data) > MAX_PEM_BYTES:
        raise ConfigError(f"{option} {path}: larger than {MAX_PEM_BYTES} bytes")
    return data


CLIENT_SECRET_ENV = "CATENARY_CLIENT_SECRET"
ENGINE_SECRET_ENV = "CATENARY_ENGINE_SECRET"
# Characters: a secret travels in the metadata of each call, which gRPC limits to 8 KiB together.
MAX_SECRET_LENGTH = 512

_SECRET = re.compile(r"[\x21-\x7e]+")


@dataclass(frozen=True, repr=False)
class Secrets:
    """The shared secrets of a deployment, one per role. None: nobody can take that role by secret."""

    client: str | None
    engine: str | None

    def __repr__(self) -> str:
        shown = ", ".join(f"{role}={'set' if getattr(self, role) else None}" for role in ("client", "engine"))
        return f"Secrets({shown})"


class RpcConfig(ServiceConfig):
    """Base of the configuration of every service that listens for gRPC."""

    model_config = settings("CATENARY_")

    headings: ClassVar[Mapping[str, str]] = {
        "listen": "gRPC: addresses, secrets, TLS",
        "max_message_mib": "gRPC: limits of messages, calls and connections",
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

    def secrets(self) -> Secrets:
        """The secrets from their files or the environment. Raises ConfigError for an unusable one."""
        found = Secrets(
            client=read_secret(self.client_secret_file, CLIENT_SECRET_ENV, option="client_secret_file"),
            engine=read_secret(self.engine_secret_file, ENGINE_SECRET_ENV, option="engine_secret_file"),
        )
        if found.client is not None and found.client == found.engine:
            raise ConfigError(
                "the secrets of clients and engines are the same: any client could attach as an engine"
            )
        return found

    def tls(self) -> TlsFiles | None:
        """The TLS files, or None if no TLS option is set."""
        if self.tls_cert is None and self.tls_key is None and self.tls_ca is None:
            if self.tls_require_client_cert:
                raise ConfigError("tls_require_client_cert needs tls_cert, tls_key and tls_ca")
            return None
        return TlsFiles(self.tls_cert, self.tls_key, self.tls_ca, self.tls_require_client_cert)


def read_secret(file: Path | None, env: str, *, option: str) -> str | None:
    """A secret from a file, else from an environment variable, else None.

    Raises:
        ConfigError: the file cannot be read, or the secret is not one line of 1..512 printable ASCII.
    """
    if file is not None:
        origin = f"{option} {file}"
        try:
            with file.open("rb") as stream:
                text = stream.read(MAX_SECRET_LENGTH + 3).decode("ascii", "replace").rstrip("\r\n")
        except OSError as error:
            raise ConfigError(f"{origin}: {error.strerror or 'cannot be read'}") from None
    else:
        origin, text = env, os.environ.get(env, "")
        if not text:
            return None
    if len(text) > MAX_SECRET_LENGTH or not _SECRET.fullmatch(text):
        raise ConfigError(
            f"{origin}: a secret is one line of 1 to {MAX_SECRET_LENGTH} printable ASCII characters"
        )
    return text
