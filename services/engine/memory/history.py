"""Remembers what the graphs of an engine took, so that the next start reserves that instead of a guess."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from catenary.telemetry import get_logger

log = get_logger(__name__)


def history_key(**facts: object) -> str:
    """A name for everything that decides what graphs take: model, dtype, device, limits, versions."""
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class GraphHistory:
    """One small file per key below the cache directory."""

    def __init__(self, cache_dir: Path, key: str) -> None:
        self._path = cache_dir / "graphs" / f"{key}.json"

    def read(self) -> int | None:
        """Bytes that the graphs of the last run needed; None if there was none or its file is damaged."""
        try:
            value = json.loads(self._path.read_text())["graph_bytes"]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError):
            log.warning("a damaged measurement of graph memory is ignored", file=str(self._path))
            return None
        return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None

    def write(self, graph_bytes: int) -> None:
        """Keeps the measurement. A directory that cannot be written costs the next start its knowledge."""
        partial = self._path.with_suffix(f".{os.getpid()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps({"graph_bytes": graph_bytes}))
            partial.replace(self._path)
        except OSError as error:
            log.warning("the measurement of graph memory is not kept", reason=str(error))
