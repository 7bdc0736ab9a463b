"""Authorities and certificates for tests of TLS."""

from __future__ import annotations

import subprocess
from pathlib import Path

from catenary.rpc import TlsFiles


def _openssl(directory: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True, timeout=60)


def make_authority(directory: Path, name: str) -> None:
    """Write NAME.pem and NAME.key."""
    _openssl(
        directory, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
        "-keyout", f"{name}.key", "-out", f"{name}.pem", "-days", "2", "-subj", f"/CN={name}",
    )  # fmt: skip


def make_certificate(
    directory: Path, name: str, authority: str, hosts: str = "DNS:localhost,IP:127.0.0.1"
) -> TlsFiles:
    """Write and return this machine's certificate with the common name `name`, signed by the authority.
    `hosts`: whom it is for."""
    (directory / f"{name}.ext").write_text(f"subjectAltName={hosts}\n")
    _openssl(
        directory, "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
        "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}",
    )  # fmt: skip
    _openssl(
        directory, "x509", "-req", "-in", f"{name}.csr", "-CA", f"{authority}.pem",
        "-CAkey", f"{authority}.key", "-CAcreateserial", "-days", "2",
        "-extfile", f"{name}.ext", "-out", f"{name}.pem",
    )  # fmt: skip
    return TlsFiles(directory / f"{name}.pem", directory / f"{name}.key", directory / f"{authority}.pem")
