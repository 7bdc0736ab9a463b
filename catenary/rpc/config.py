"""The options of a service's gRPC side: addresses, secrets, TLS files, limits."""

from __future__ import annotations

import os
import re
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from catenary.config import CLIENT_SECRET_ENV, ENGINE_SECRET_ENV, ConfigError, ListenOptions, settings

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
    """Return the credentials of a listening side.

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
    """Return the credentials of a dialling side. Raises StartRefused like `server_credentials`."""
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


# Characters: a secret travels in the metadata of each call, which gRPC limits to 8 KiB together.
MAX_SECRET_LENGTH = 512

_SECRET = re.compile(r"[\x21-\x7e]+")


@dataclass(frozen=True, repr=False)
class Secrets:
    """The shared secrets of a deployment, one per role. None: no caller can take that role by secret."""

    client: str | None
    engine: str | None

    def __repr__(self) -> str:
        shown = ", ".join(f"{role}={'set' if getattr(self, role) else None}" for role in ("client", "engine"))
        return f"Secrets({shown})"


class RpcConfig(ListenOptions):
    """Base of the configuration of every service that listens for gRPC."""

    model_config = settings("CATENARY_")

    def secrets(self) -> Secrets:
        """Return the secrets from their files or the environment. Raises ConfigError for an unusable one."""
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
        """Return the TLS files, or None if no TLS option is set."""
        if self.tls_cert is None and self.tls_key is None and self.tls_ca is None:
            if self.tls_require_client_cert:
                raise ConfigError("tls_require_client_cert needs tls_cert, tls_key and tls_ca")
            return None
        return TlsFiles(self.tls_cert, self.tls_key, self.tls_ca, self.tls_require_client_cert)


def read_secret(file: Path | None, env: str, *, option: str) -> str | None:
    """Return a secret from a file, else from an environment variable, else None.

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
