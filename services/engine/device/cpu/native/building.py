"""Building the kernels: one shared library for each instruction set, made once and kept.

A library's name has two hashes: of the sources and the compiler's options, and of the compiler. Where there
is a compiler both should fit. Where there is none, as in a container, any library of these sources does.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from catenary.cpus import read_topology
from services.engine.device.cpu.native.levels import Level

SOURCES = Path(__file__).parent
# Libraries that were built beforehand, as an image's build does: a container may not write anywhere.
BUILT = SOURCES / "built"

_COMPILERS = ("c++", "g++", "clang++")
# No -ffast-math: what is no number must stay none. No contraction but where the sources say so: a row's sums
# must not depend on how a compiler treats the loop that they are in. No strict aliasing: scores become
# weights, pairs of brain floats among them, in the same memory.
_OPTIONS = (
    "-std=c++20",
    "-O3",
    "-fno-math-errno",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fPIC",
    "-fvisibility=hidden",
)
_LINK = ("-shared", "-pthread")
# Libraries that stay in the cache, of all versions together.
_KEPT = 32
_COMPILE_TIMEOUT_S = 600.0
_UNFINISHED = ".building-"


class BuildError(Exception):
    """There is no compiler, it refused the sources, or there is no safe place for a library. One line."""


def find_compiler() -> str | None:
    """The C++ compiler: `$CXX`, or the first of c++, g++ and clang++ on the path. None if there is none."""
    chosen = os.environ.get("CXX")
    return next(
        (found for name in ([chosen] if chosen else _COMPILERS) if (found := shutil.which(name))), None
    )


def kernel_directory(cache: Path | None) -> Path:
    """Where libraries are kept, below Catenary's cache: `cache`, `$CATENARY_CACHE` or ~/.cache/catenary."""
    configured = os.environ.get("CATENARY_CACHE")
    default = Path(configured).expanduser() if configured else Path.home() / ".cache" / "catenary"
    return (cache or default) / "native"


def build(level: Level, directory: Path) -> Path:
    """The library of `level`: one that is ready here, else built now and kept in `directory`.

    Several processes may call this at once: one builds. Raises BuildError if there is none and it cannot be
    built.
    """
    stem = f"{level.name}-{_hash_of_sources(level)}"
    try:
        return _build_here(level, stem, directory)
    except BuildError:
        # Another compiler's, of these sources: an image has what its own build made.
        ready = _ready(directory, f"{stem}-*.so")
        if not ready:
            raise
        return ready[0]


def _build_here(level: Level, stem: str, directory: Path) -> Path:
    compiler = find_compiler()
    if compiler is None:
        raise BuildError("no C++ compiler is here: install g++, or set CXX to its path")
    name = f"{stem}-{_short_hash(_version_of(compiler))}.so"
    ready = _ready(directory, name)
    if ready:
        return ready[0]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not _is_ours(directory):
            raise BuildError(f"{directory} is another user's, or all may write to it: no code is kept there")
        with _locked(directory):
            if not _ours(directory, name):
                _compile(compiler, level, directory / name)
                _drop_the_oldest(directory)
    except OSError as error:
        raise BuildError(f"{directory} cannot keep the kernels: {error.strerror}") from error
    return directory / name


def _ready(directory: Path, pattern: str) -> list[Path]:
    """Libraries that came with the sources, are kept in `directory`, or where `make setup` puts them."""
    return [path for place in (BUILT, directory, kernel_directory(None)) for path in _ours(place, pattern)]


def _ours(directory: Path, pattern: str) -> list[Path]:
    """Libraries in a directory, if nobody else can have put them there; none of one that cannot be read."""
    if not _is_ours(directory):
        return []
    return [path for path in sorted(directory.glob(pattern)) if _is_ours(path)]


def _is_ours(path: Path) -> bool:
    """Whether what is there is this user's or the system's, and not everybody may change it."""
    try:
        status = path.stat()
    except OSError:
        return False
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & stat.S_IWOTH


def _sources(pattern: str) -> list[Path]:
    return sorted(SOURCES.glob(pattern))


def _hash_of_sources(level: Level) -> str:
    parts = [
        path.name.encode() + b"\0" + path.read_bytes() for path in (*_sources("*.h"), *_sources("*.cpp"))
    ]
    options = (platform.machine(), *_OPTIONS, *_LINK, *level.options)
    return _short_hash(b"\0".join([*parts, " ".join(options).encode()]))


def _short_hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _version_of(compiler: str) -> bytes:
    return _run([compiler, "--version"]).encode()


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    with (directory / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _compile(compiler: str, level: Level, library: Path) -> None:
    # Of builders that were killed: whoever builds holds the lock.
    for left in library.parent.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=_UNFINISHED) as scratch:

        def compile_one(source: Path) -> Path:
            made = Path(scratch) / f"{source.stem}.o"
            _run([compiler, *_OPTIONS, *level.options, "-c", str(source), "-o", str(made)])
            return made

        with ThreadPoolExecutor(max(1, read_topology().limit)) as pool:
            objects = list(pool.map(compile_one, _sources("*.cpp")))
        linked = Path(scratch) / library.name
        _run([compiler, *_LINK, *map(str, objects), "-o", str(linked)])
        # Whoever looks for the library meanwhile finds a whole one or none.
        linked.replace(library)


def _run(command: Sequence[str]) -> str:
    """What a command says. Raises BuildError if it fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_COMPILE_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} did not run: {type(error).__name__}") from error
    if done.returncode != 0:
        complaint = next((line for line in done.stderr.splitlines() if "error" in line), "it said nothing")
        raise BuildError(f"{command[0]} failed: {complaint.strip()}")
    return done.stdout


def _drop_the_oldest(directory: Path) -> None:
    """Every version of the sources leaves its libraries here; the cache must not grow for ever."""
    libraries = sorted(directory.glob("*.so"), key=lambda path: path.stat().st_mtime, reverse=True)
    for library in libraries[_KEPT:]:
        library.unlink(missing_ok=True)
