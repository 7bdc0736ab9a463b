"""Which card a process owns: one process for each module."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from services.engine.device.sim.errors import acquire_failed
from services.engine.device.sim.settings import SimSettings


def visible_modules(environment: Mapping[str, str], settings: SimSettings) -> list[int]:
    """The modules that this process may take: HLS_MODULE_ID, else HABANA_VISIBLE_MODULES, else all.

    Raises SimError for one that the host does not have.
    """
    text = environment.get("HLS_MODULE_ID") or environment.get("HABANA_VISIBLE_MODULES")
    if not text or text == "all":
        return list(range(settings.modules))
    modules = text.split(",")
    for module in modules:
        if not module.isdecimal() or int(module) >= settings.modules:
            raise acquire_failed(f"no module {module!r}")
    return [int(module) for module in modules]


def acquire(settings: SimSettings, environment: Mapping[str, str]) -> TextIO:
    """Takes a module for the life of this process, as the bridge does at the first touch of the device.

    It is the first of the visible ones that no other process has.
    """
    if not settings.driver:
        raise acquire_failed("no driver is loaded")
    modules = visible_modules(environment, settings)
    for module in modules:
        file = _lock_file(settings.lock_directory / f"catenary-sim-{os.getuid()}-module-{module}.lock")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
        else:
            return file
    raise acquire_failed(f"module id {','.join(map(str, modules))}")


def _lock_file(path: Path) -> TextIO:
    """Opens or makes it. Raises SimError if it is not this user's: others can guess its name."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise acquire_failed(f"{path}: {error.strerror}") from None
    if os.fstat(descriptor).st_uid != os.getuid():
        os.close(descriptor)
        raise acquire_failed(f"{path} is another user's")
    return os.fdopen(descriptor, "r+")
