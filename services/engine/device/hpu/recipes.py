"""The recipe cache: compiled recipes on disk, for the next start. Source: docs/gaudi-facts.md 2.4."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

from catenary.directories import NoHomeError, expanded
from services.engine.device.base import DeviceError
from services.engine.device.hpu.settings import RecipeCache

VARIABLE = "PT_HPU_RECIPE_CACHE_CONFIG"

_MIB = 2**20
# Recipes of one small model. With less a start would compile, fail to write, and say nothing of it.
_LEAST_FREE = 64 * _MIB


def use_recipe_cache(
    cache: RecipeCache, version: str, rank: int, environment: MutableMapping[str, str] = os.environ
) -> Path:
    """Makes the bridge keep recipes in a directory of this rank, and returns it.

    Each release of the software gets its own: another's recipes are void. Called before the bridge is
    imported. Raises DeviceError if the directory cannot be found or written, or its disk is full.
    """
    try:
        directory = expanded(cache.directory) / version / f"rank{rank}"
    except NoHomeError as error:
        raise DeviceError(f"the recipe cache {cache.directory}: {error}") from None
    _check(directory, cache.directory)
    # <directory>,<delete on start>,<MiB at the most>
    environment[VARIABLE] = f"{directory},{'true' if cache.clear else 'false'},{cache.max_mib}"
    return directory


def check_given_cache(environment: MutableMapping[str, str] = os.environ) -> None:
    """Checks the directory that the operator's own variable names, if there is one. Raises DeviceError."""
    name = environment.get(VARIABLE, "").split(",")[0].strip()
    if name:
        _check(Path(name), Path(name))


def _check(directory: Path, named: Path) -> None:
    if "," in str(directory):
        raise DeviceError(
            f"recipe cache {named} has a comma in its name, which separates the bridge's fields"
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(bytes(_MIB))
            file.flush()
        free = shutil.disk_usage(directory).free
    except OSError as error:
        raise DeviceError(
            f"recipe cache {named} cannot be written ({error.strerror}): make it writable for this user, "
            "free space there, or name another directory with --recipe-cache"
        ) from None
    if free < _LEAST_FREE:
        raise DeviceError(
            f"the disk of recipe cache {named} is full: {free // _MIB} MiB are free and recipes need at "
            f"least {_LEAST_FREE // _MIB}: free space, or name another directory with --recipe-cache"
        )
