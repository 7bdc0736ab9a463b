"""Where a gateway keeps what outlives it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Self

from catenary.config import ConfigError
from catenary.directories import NoHomeError, expanded
from catenary.telemetry import get_logger

_log = get_logger(__name__)


class StateDirectory:
    """A directory whose files only this user can read. `path` None: there is none, nothing can be stored."""

    def __init__(self, path: Path | None, temporary: tempfile.TemporaryDirectory[str] | None = None) -> None:
        self.path = path
        self._temporary = temporary

    @classmethod
    def open(cls, configured: Path | None, port: int) -> Self:
        """The directory of the option `state_dir`; without it one for the port, or for port 0, which is
        another one at each start, a temporary one.

        Raises StartRefused if the configured one cannot be written. If a default cannot be, as in a container
        without a volume, there is none, and the log says so.
        """
        if configured is not None:
            try:
                return cls(_made(expanded(configured)))
            except NoHomeError as error:
                raise ConfigError(f"--state-dir: {error}") from None
            except OSError as error:
                raise ConfigError(f"--state-dir: {configured} cannot be written: {error.strerror}") from None
        try:
            if not port:
                temporary = tempfile.TemporaryDirectory(prefix="catenary-gateway-")
                return cls(Path(temporary.name), temporary)
            base = expanded(os.environ.get("XDG_STATE_HOME") or "~/.local/state")
            return cls(_made(base / "catenary" / f"gateway-{port}"))
        except (OSError, NoHomeError):
            _log.warning("nothing can be stored: no directory for state can be written; see --state-dir")
            return cls(None)

    def close(self) -> None:
        """Remove a temporary one."""
        if self._temporary is not None:
            self._temporary.cleanup()


def _made(path: Path) -> Path:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.stat().st_mode & 0o077:
        # It was there before, and may hold something else that others are to see: its mode is left as it is.
        _log.warning(
            "others may list the state directory; the files in it are for this user alone", path=str(path)
        )
    with tempfile.TemporaryFile(dir=path):
        return path
