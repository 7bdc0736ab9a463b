"""A user's home, and the directory of the cache where none is configured."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

CACHE_ENV = "CATENARY_CACHE"


class NoHomeError(Exception):
    """The process's user has no home directory, as in a container that runs under any number. One line."""


def home_directory() -> Path:
    """Return `$HOME`, or the home of the passwd file if it is not set or empty. Raises NoHomeError."""
    if home := os.environ.get("HOME"):
        return Path(home)
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        raise NoHomeError(
            f"user {os.getuid()} has no home directory: set HOME, or write the path without ~"
        ) from None


def expanded(path: str | Path) -> Path:
    """Return the path with a leading `~` resolved. Raises NoHomeError where there is none for it."""
    text = os.fspath(path)
    if text == "~" or text.startswith("~/"):
        return home_directory() / text[2:]
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise NoHomeError(f"{text.split('/')[0]}: there is no such user") from None


def cache_directory() -> Path:
    """Return `$CATENARY_CACHE`, else `~/.cache/catenary`. Raises NoHomeError."""
    if given := os.environ.get(CACHE_ENV):
        return expanded(given)
    try:
        return expanded("~/.cache/catenary")
    except NoHomeError:
        raise NoHomeError(f"user {os.getuid()} has no home directory: set HOME or {CACHE_ENV}") from None


def forbids_code(directory: Path) -> bool:
    """Return whether libraries in this directory cannot be loaded: its file system is mounted noexec.

    Of a directory that is not there yet, where it would be made.
    """
    for place in (directory, *directory.absolute().parents):
        try:
            return bool(os.statvfs(place).f_flag & os.ST_NOEXEC)
        except OSError:
            continue
    return False


def why_no_code(directory: Path) -> str:
    """Return the reason for which `directory` cannot keep code, for one line, and what mends it."""
    return (
        f"{directory} is on a file system that is mounted noexec, from which no code can be loaded: choose "
        f"another directory with --cache-dir or {CACHE_ENV}"
    )
