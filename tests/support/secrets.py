"""Secrets of a test deployment, as files and as values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from catenary.rpc import Secrets


@dataclass(frozen=True)
class TestSecrets:
    """Both roles' secrets; `options` are the fields that every service's configuration takes."""

    __test__ = False

    client: str
    engine: str
    client_file: Path
    engine_file: Path

    @classmethod
    def write(cls, directory: Path) -> TestSecrets:
        """Write a pair into a directory."""
        files = directory / "client-secret", directory / "engine-secret"
        for file in files:
            file.write_text(f"secret-of-{file.name}\n")
        return cls("secret-of-client-secret", "secret-of-engine-secret", *files)

    @property
    def options(self) -> dict[str, Any]:
        """Configuration fields."""
        return {"client_secret_file": self.client_file, "engine_secret_file": self.engine_file}

    @property
    def flags(self) -> list[str]:
        """The same as flags."""
        return [
            f"--client-secret-file={self.client_file}",
            f"--engine-secret-file={self.engine_file}",
        ]

    def pair(self) -> Secrets:
        """As the RPC layer takes them."""
        return Secrets(client=self.client, engine=self.engine)
