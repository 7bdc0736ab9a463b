"""The allocator that an engine's core is started with: a library that is preloaded if it is installed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

PRELOAD = "LD_PRELOAD"
# In the order in which they are tried: file names begin so.
_LIBRARIES = {"tcmalloc": ("libtcmalloc_minimal.so.", "libtcmalloc.so."), "jemalloc": ("libjemalloc.so.",)}
_FOLDERS = ("usr/local/lib", "usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64", "usr/lib")


def preloaded(malloc: str, environment: Mapping[str, str], root: Path = Path("/")) -> dict[str, str]:
    """Return what to add to a core's environment for the option `malloc`.

    auto leaves a preload that somebody chose as it is. Raises ValueError, one line, for an allocator that was
    asked for and is not there.
    """
    chosen = environment.get(PRELOAD, "")
    if malloc == "system" or (malloc == "auto" and chosen):
        return {}
    names = list(_LIBRARIES) if malloc == "auto" else [malloc]
    found = next((path for name in names if (path := _find(name, root)) is not None), None)
    if found is not None:
        return {PRELOAD: f"{found}:{chosen}" if chosen else str(found)}
    if malloc == "auto":
        return {}
    raise ValueError(
        f"malloc {malloc}: no {_LIBRARIES[malloc][0]}* in {', '.join('/' + one for one in _FOLDERS)}"
    )


def _find(name: str, root: Path) -> Path | None:
    for start in _LIBRARIES[name]:
        for folder in _FOLDERS:
            # The number behind .so is that of the interface: what begins with it alone is what programs load.
            if found := sorted((root / folder).glob(f"{start}[0-9]")):
                return found[0]
    return None
