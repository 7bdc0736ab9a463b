"""The file of API keys: one a line, each maybe with limits of its own."""

from __future__ import annotations

import re
from pathlib import Path

from catenary.config import ConfigError

# Thousands of keys; a larger file was named by mistake.
MAX_KEY_FILE_BYTES = 1 << 20
LIMITS = {
    "requests-per-minute": "requests_per_minute",
    "tokens-per-minute": "tokens_per_minute",
    "concurrent": "concurrent",
}
"""What may follow a key as NAME=NUMBER, and the fields of KeyLimits that these are."""

_LIMIT = re.compile(r"([a-z-]+)=([0-9]{1,12})")


def read_key_file(file: Path) -> dict[str, dict[str, int]]:
    """The keys of the file, and the limits by field that stand behind each. Raises StartRefused if it cannot
    be read, holds no key, limits without one, or something else behind one."""
    try:
        with file.open("rb") as stream:
            # Some editors begin a file with a byte order mark: it would be part of the first key.
            lines = stream.read(MAX_KEY_FILE_BYTES).decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError):
        raise ConfigError(f"--api-key-file {file}: cannot be read") from None
    keys: dict[str, dict[str, int]] = {}
    for number, line in enumerate(lines, 1):
        key, *words = line.split() or [""]
        if not key or key.startswith("#"):
            continue
        if (match := _LIMIT.fullmatch(key)) and match[1] in LIMITS:
            # What `$KEY concurrent=4` leaves behind without a KEY would be a key that is easily guessed.
            raise ConfigError(f"--api-key-file {file}: line {number}: has limits and no key before them")
        keys[key] = {}
        for word in words:
            match = _LIMIT.fullmatch(word)
            if match is None or match[1] not in LIMITS:
                # Not the word itself: it may be part of a key.
                names = ", ".join(f"{name}=N" for name in LIMITS)
                raise ConfigError(f"--api-key-file {file}: line {number}: behind a key may be {names}")
            keys[key][LIMITS[match[1]]] = int(match[2])
    if not keys:
        # An empty file must not open the server to everyone.
        raise ConfigError(f"--api-key-file {file}: holds no key")
    return keys
