"""Which card a process owns: one process for each module."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from typing import TextIO

from services.engine.device.sim.errors import SimError, acquire_failed
from services.engine.device.sim.settings import SimSettings


def module_id(environment: Mapping[str, str], settings: SimSettings) -> int:
    """The module of this process: HLS_MODULE_ID, or the first visible one (facts 4.6)."""
    visible = environment.get("HABANA_VISIBLE_MODULES")
    text = environment.get("HLS_MODULE_ID") or (visible.split(",")[0] if visible else "0")
    if not text.isdigit() or int(text) >= settings.modules:
        raise SimError(f"synStatus=8 [Device not found] Device acquire failed. no module {text!r}")
    return int(text)


def acquire(settings: SimSettings) -> TextIO:
    """Takes the module for the life of this process, as the bridge does at the first touch of the device."""
    if not settings.driver:
        raise SimError("synStatus=8 [Device not found] Device acquire failed. No driver is loaded")
    module = module_id(os.environ, settings)
    file = (settings.lock_directory / f"catenary-sim-{os.getuid()}-module-{module}.lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise acquire_failed(module) from None
    return file
