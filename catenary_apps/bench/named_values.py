"""NAME=VALUE as options say it."""

from __future__ import annotations

from collections.abc import Sequence

from catenary.config import ConfigError


def named_values(option: str, entries: Sequence[str]) -> dict[str, str]:
    """Values by name; of two with one name the last. Raises StartRefused, one line."""
    found: dict[str, str] = {}
    for entry in entries:
        name, equals, value = entry.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"{option}: NAME=VALUE")
        found[name.strip()] = value
    return found
