"""The directory of one run of `catenary up`: its sockets, its secrets, and the lock that says it lives."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from catenary.addresses import MAX_UNIX_PATH_BYTES
from catenary.config import ConfigError
from catenary.runtime import StartRefused

# Environment variables by which a person may set the secrets; children get them as files instead.
CLIENT_SECRET_ENV = "CATENARY_CLIENT_SECRET"
ENGINE_SECRET_ENV = "CATENARY_ENGINE_SECRET"

PREFIX = "catenary-"
# Holds the supervisor's process id, and is locked for as long as it lives: the kernel lets go of a lock
# however a process ends, and a process id may be another's by then.
LOCK_NAME = "supervisor.pid"
ABOUT_NAME = "about.txt"
# The most that comes behind the temporary directory.
_LONGEST_SOCKET = f"/{PREFIX}xxxxxxxx/tokenizer-9999.sock"


@dataclass(frozen=True, slots=True)
class RuntimeDirectory:
    """A private directory (0700) that ends with the run."""

    path: Path
    _lock: TextIO | None = field(default=None, repr=False, compare=False)

    @classmethod
    def create(cls) -> RuntimeDirectory:
        """Make a directory with its secrets, locked by this process; remove those of dead ones.

        Raises StartRefused if there is no place for it.
        """
        check_temporary_directory()
        remove_stale()
        # The system's temporary directory, not the cache, since a unix socket's path is short.
        path: Path | None = None
        try:
            path = Path(tempfile.mkdtemp(prefix=PREFIX))
            directory = cls(path, _locked(path))
            directory.write_secret(directory.client_secret, os.environ.get(CLIENT_SECRET_ENV))
            directory.write_secret(directory.engine_secret, os.environ.get(ENGINE_SECRET_ENV))
        except OSError as error:
            if path is not None:
                shutil.rmtree(path, ignore_errors=True)
            raise StartRefused(
                f"{tempfile.gettempdir()}: no files can be written there ({error.strerror}): set TMPDIR to a "
                "directory with room"
            ) from None
        return directory

    @property
    def client_secret(self) -> Path:
        return self.path / "client.secret"

    @property
    def engine_secret(self) -> Path:
        return self.path / "engine.secret"

    def socket(self, name: str) -> str:
        """Return the gRPC address of a service's unix socket."""
        return f"unix:{self.path / name}.sock"

    def sockets(self, service: str) -> list[str]:
        """Return the gRPC addresses of the sockets that there are of a service, which may run several times.
        Before there are any, that of a single one."""
        found = [path.stem for path in self.path.glob(f"{service}*.sock")] or [service]
        return [self.socket(name) for name in sorted(found, key=lambda name: (len(name), name))]

    def describe(self, text: str) -> None:
        """Write how this run differs from others, for a person: its port, its models, when it began.

        On a full disk it stays without: `about` is a help, and no service reads it.
        """
        with contextlib.suppress(OSError):
            (self.path / ABOUT_NAME).write_text(text, encoding="utf-8")

    @property
    def about(self) -> str:
        """The description that `describe` wrote, empty if it has not yet."""
        try:
            return (self.path / ABOUT_NAME).read_text(encoding="utf-8")
        except OSError:
            return ""

    def write_secret(self, path: Path, value: str | None) -> None:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write((value or secrets.token_urlsafe(32)) + "\n")

    def remove(self) -> None:
        """Remove the directory and let go of its lock."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()


def check_temporary_directory() -> None:
    """Check that sockets can be made in the temporary directory, by this process and those that it starts.

    Raises StartRefused.
    """
    chosen = os.environ.get("TMPDIR")
    if chosen and not (os.path.isdir(chosen) and os.access(chosen, os.W_OK | os.X_OK)):
        raise ConfigError(f"TMPDIR: {chosen} is no directory that can be written")
    try:
        directory = tempfile.gettempdir()
    except OSError:
        raise ConfigError("no temporary directory can be written: set TMPDIR to one that can") from None
    room = MAX_UNIX_PATH_BYTES - len(os.fsencode(directory))
    if room < len(_LONGEST_SOCKET):
        raise ConfigError(
            f"TMPDIR: {directory} is too long for the sockets in it: choose one of at most "
            f"{MAX_UNIX_PATH_BYTES - len(_LONGEST_SOCKET)} bytes"
        )


def _locked(directory: Path) -> TextIO:
    """Write and lock the directory's lock file. It gets its name once it is locked: see `remove_stale`."""
    unnamed = directory / f".{LOCK_NAME}"
    file = unnamed.open("w", encoding="utf-8")
    fcntl.flock(file, fcntl.LOCK_EX)
    file.write(f"{os.getpid()}\n")
    file.flush()
    unnamed.rename(directory / LOCK_NAME)
    return file


def remove_stale() -> None:
    """Remove this user's directories whose supervisor ended without doing so, by SIGKILL for example."""
    for path in _own_directories(Path(tempfile.gettempdir())):
        with contextlib.suppress(OSError), (path / LOCK_NAME).open(encoding="utf-8") as lock:
            # Fails while the supervisor lives.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)


def running() -> Iterator[RuntimeDirectory]:
    """Yield this user's directories whose supervisor lives, oldest first."""
    found = sorted(_own_directories(Path(tempfile.gettempdir())), key=lambda path: path.stat().st_ctime_ns)
    for path in found:
        with contextlib.suppress(FileNotFoundError), (path / LOCK_NAME).open(encoding="utf-8") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                yield RuntimeDirectory(path)


def choices(addresses: Iterable[tuple[RuntimeDirectory, str]]) -> str:
    """Return addresses of several runs, each with what its run is about, for a person to choose from."""
    shown = (f"{address} ({run.about})" if run.about else address for run, address in addresses)
    return ", ".join(shown)


def _own_directories(parent: Path) -> Iterator[Path]:
    for path in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            status = path.lstat()
            private = stat.S_IMODE(status.st_mode) == 0o700
            if stat.S_ISDIR(status.st_mode) and private and status.st_uid == os.getuid():
                yield path
