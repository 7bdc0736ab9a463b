"""Building the kernels: one shared library for each instruction set, made once and kept.

A library's name has two hashes: of the sources and the compiler's options, and of the compiler. Where there
is a compiler both should fit. Where there is none, as in a container, any library of these sources does.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from services.engine.device.cpu.native.levels import Level

SOURCES = Path(__file__).parent
# Libraries that were built beforehand, as an image's build does: a container may not write anywhere.
BUILT = SOURCES / "built"

_COMPILERS = ("c++", "g++", "clang++")
# No -ffast-math: what is no number must stay none. No contraction but where the sources say so: a row's sums
# must not depend on how a compiler treats the loop that they are in.
_OPTIONS = ("-std=c++20", "-O3", "-fno-math-errno", "-ffp-contract=off", "-fPIC", "-fvisibility=hidden")
_LINK = ("-shared", "-pthread")
# Libraries that stay in the cache, of all versions together.
_KEPT = 32
_COMPILE_TIMEOUT_S = 600.0


class BuildError(Exception):
    """There is no compiler, or it refused the sources. One line."""


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
    """The library of `level`: one that is kept in `directory` or came with the sources, else built now.

    Several processes may call this at once: one builds. Raises BuildError if there is none and it cannot be
    built.
    """
    stem = f"{level.name}-{_hash_of_sources(level)}"
    try:
        return _build_here(level, stem, directory)
    except BuildError:
        # Another compiler's, of these sources: an image has what its own build made.
        ready = [*BUILT.glob(f"{stem}-*.so"), *directory.glob(f"{stem}-*.so")]
        if not ready:
            raise
        return ready[0]


def _build_here(level: Level, stem: str, directory: Path) -> Path:
    compiler = find_compiler()
    if compiler is None:
        raise BuildError("no C++ compiler is here: install g++, or set CXX")
    name = f"{stem}-{_short_hash(_version_of(compiler))}.so"
    for candidate in (BUILT / name, directory / name):
        if candidate.exists():
            return candidate
    try:
        with _locked(directory):
            if not (directory / name).exists():
                _compile(compiler, level, directory / name)
                _drop_the_oldest(directory)
    except OSError as error:
        raise BuildError(f"{directory} cannot keep the kernels: {error.strerror}") from error
    return directory / name


def _sources(pattern: str) -> list[Path]:
    return sorted(SOURCES.glob(pattern))


def _hash_of_sources(level: Level) -> str:
    parts = [
        path.name.encode() + b"\0" + path.read_bytes() for path in (*_sources("*.h"), *_sources("*.cpp"))
    ]
    return _short_hash(b"\0".join([*parts, " ".join((*_OPTIONS, *_LINK, *level.options)).encode()]))


def _short_hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _version_of(compiler: str) -> bytes:
    return subprocess.run([compiler, "--version"], capture_output=True, check=False, timeout=60).stdout


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _compile(compiler: str, level: Level, library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=".building-") as scratch:

        def compile_one(source: Path) -> Path:
            made = Path(scratch) / f"{source.stem}.o"
            _run([compiler, *_OPTIONS, *level.options, "-c", str(source), "-o", str(made)])
            return made

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile_one, _sources("*.cpp")))
        linked = Path(scratch) / library.name
        _run([compiler, *_LINK, *map(str, objects), "-o", str(linked)])
        # Whoever looks for the library meanwhile finds a whole one or none.
        linked.replace(library)


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_COMPILE_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} did not run: {type(error).__name__}") from error
    if done.returncode != 0:
        complaint = next((line for line in done.stderr.splitlines() if "error" in line), "it said nothing")
        raise BuildError(f"{command[0]} failed: {complaint.strip()}")


def _drop_the_oldest(directory: Path) -> None:
    """Every version of the sources leaves its libraries here; the cache must not grow for ever."""
    libraries = sorted(directory.glob("*.so"), key=lambda path: path.stat().st_mtime, reverse=True)
    for library in libraries[_KEPT:]:
        library.unlink(missing_ok=True)
