"""Where a run of `catenary up` keeps its sockets, secrets and logs."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from catenary.runtime import StartRefused

# Environment variables by which a person may set the secrets; children get them as files instead.
CLIENT_SECRET_ENV = "CATENARY_CLIENT_SECRET"
ENGINE_SECRET_ENV = "CATENARY_ENGINE_SECRET"


def cache_directory(configured: Path | None) -> Path:
    """Return the directory of prepared models and logs."""
    if configured is not None:
        return configured.expanduser()
    return Path(os.environ.get("CATENARY_CACHE") or "~/.cache/catenary").expanduser()


def require_writable(directory: Path, option: str) -> None:
    """Make a directory and see that files can be written in it. Raises StartRefused that names the option."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise StartRefused(f"--{option}: {directory} cannot be written: {error.strerror}") from None


@dataclass(frozen=True, slots=True)
class RuntimeDirectory:
    """A private directory (0700) that ends with the run."""

    path: Path

    @classmethod
    def create(cls) -> RuntimeDirectory:
        # The system's temporary directory, not the cache: a unix socket's path may have 107 bytes.
        directory = cls(Path(tempfile.mkdtemp(prefix="catenary-")))
        directory.write_secret(directory.client_secret, os.environ.get(CLIENT_SECRET_ENV))
        directory.write_secret(directory.engine_secret, os.environ.get(ENGINE_SECRET_ENV))
        return directory

    @property
    def client_secret(self) -> Path:
        return self.path / "client.secret"

    @property
    def engine_secret(self) -> Path:
        return self.path / "engine.secret"

    def socket(self, name: str) -> str:
        """Return the gRPC address of a service's unix socket."""
        return f"unix:{self.path / name}.sock"

    def write_secret(self, path: Path, value: str | None) -> None:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write((value or secrets.token_urlsafe(32)) + "\n")

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
