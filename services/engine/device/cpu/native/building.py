"""Building the kernels: one shared library for each instruction set, made once and kept.

A library's name has two hashes: of the sources and the compiler's options, and of the compiler. Where there
is a compiler both should fit. Where there is none, as in a container, any library of these sources does.
"""

from __future__ import annotations

import fcntl
import hashlib
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from catenary.cpus import read_topology
from catenary.directories import forbids_code, why_no_code
from catenary.telemetry import get_logger
from services.engine.device.cpu.native.compiler import COMPILE_S, BuildError, find_compiler, identity, run
from services.engine.device.cpu.native.kept import (
    drop_the_oldest,
    is_ours,
    kernel_directory,
    make_directory,
    seal,
    sound,
)
from services.engine.device.cpu.native.levels import Level

log = get_logger(__name__)

SOURCES = Path(__file__).parent
# Libraries that were built beforehand, as an image's build does: a container may not write anywhere.
BUILT = SOURCES / "built"

# No -ffast-math: NaN must stay NaN. No contraction but where the sources say so: a row's sums
# must not depend on how a compiler treats the loop that they are in.
_OPTIONS = ("-std=c++17", "-O3", "-fno-math-errno", "-ffp-contract=off", "-fPIC", "-fvisibility=hidden")
_LINK = ("-shared", "-pthread")
_UNFINISHED = ".building-"
_ONCE = (
    "compiling the CPU's kernels, once for this machine (about a minute of one core, longer on a busy one)"
)

Progress = Callable[[str], None]


def build(
    level: Level, directory: Path, progress: Progress = lambda _: None, limit_s: float = COMPILE_S
) -> Path:
    """The library of `level`: one that is ready here, else built now and kept in `directory`.

    `progress` gets lines about the build, on the caller's thread. A library that is damaged counts as none.
    Several processes may call this at once: one builds. `limit_s`: seconds that compiling one file may take.
    Raises BuildError if there is none and it cannot be built.
    """
    stem = f"{level.name}-{_hash_of_sources(level)}"
    try:
        return _build_here(level, stem, directory, progress, limit_s)
    except BuildError:
        # Another compiler's, of these sources: an image has what its own build made.
        ready = _ready(directory, f"{stem}-*.so")
        if not ready:
            raise
        return ready[0]


def _build_here(level: Level, stem: str, directory: Path, progress: Progress, limit_s: float) -> Path:
    compiler = find_compiler()
    name = f"{stem}-{_short_hash(identity(compiler))}.so"
    ready = _ready(directory, name)
    if ready:
        return ready[0]
    if forbids_code(directory):
        raise BuildError(why_no_code(directory))
    try:
        make_directory(directory)
        if not is_ours(directory):
            raise BuildError(
                f"{directory} is another user's, or others may write to it: no code is kept there "
                "(chmod go-w mends the latter)"
            )
        progress(_ONCE)
        with _locked(directory):
            if not sound([directory], name):
                _compile(compiler, level, directory / name, progress, limit_s)
                drop_the_oldest(directory)
    except OSError as error:
        raise BuildError(f"{directory} cannot keep the kernels: {error.strerror}") from error
    return directory / name


def _ready(directory: Path, pattern: str) -> list[Path]:
    """Libraries that came with the sources, are kept in `directory`, or where `make setup` puts them."""
    places = [BUILT, directory]
    with suppress(BuildError):
        places.append(kernel_directory(None))
    return sound(places, pattern)


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


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    with (directory / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _compile(
    compiler: Sequence[str], level: Level, library: Path, progress: Progress, limit_s: float
) -> None:
    log.info(
        "building the CPU's kernels, once for this machine: 30 to 60 s on one core, shared by all of them",
        level=level.name,
        directory=str(library.parent),
    )
    # Left by builders that were killed: a builder that lives holds the lock, as this one does.
    for left in library.parent.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=_UNFINISHED) as scratch:

        def compile_one(source: Path) -> Path:
            made = Path(scratch) / f"{source.stem}.o"
            run([*compiler, *_OPTIONS, *level.options, "-c", str(source), "-o", str(made)], limit_s)
            return made

        pool = ThreadPoolExecutor(max(1, read_topology().limit))
        try:
            sources, objects = _sources("*.cpp"), []
            for made in pool.map(compile_one, sources):
                objects.append(made)
                progress(f"{_ONCE}: {len(objects)} of {len(sources)} files")
        finally:
            # After a failure the other files are of no use.
            pool.shutdown(cancel_futures=True)
        linked = Path(scratch) / library.name
        run([*compiler, *_LINK, *map(str, objects), "-o", str(linked)], limit_s)
        seal(linked, library.name)
        # Atomic: a process finds the whole library or none, and one that has loaded the old file keeps it.
        linked.replace(library)
