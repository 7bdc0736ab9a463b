"""Which card a process owns: one process for each module."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
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
        if not module.isdigit() or int(module) >= settings.modules:
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
        file = (settings.lock_directory / f"catenary-sim-{os.getuid()}-module-{module}.lock").open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
        else:
            return file
    raise acquire_failed(f"module id {','.join(map(str, modules))}")
