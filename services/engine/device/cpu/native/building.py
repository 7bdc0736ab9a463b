"""Build the kernels: one shared library for each instruction set, made once and kept.

A library ends with a digest of its name and of all before it, which loaders do not look at. A file that was
cut off, overwritten or renamed has another one: to load it would end the process at worst.

A library's name has two hashes: of the sources and the compiler's options, and of the compiler. Where there
is a compiler both should fit. Where there is none, as in a container, any library of these sources does.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from catenary.cpus import read_topology
from catenary.directories import NoHomeError, cache_directory, forbids_code, why_no_code
from catenary.telemetry import get_logger

_CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class Level:
    """One instruction set: the compiler's options, and the flags (Linux's names) of CPUs that have it."""

    name: str
    options: tuple[str, ...]
    needs: frozenset[str]


_AVX2 = frozenset({"avx2", "fma", "f16c"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"}
_AVX512_OPTIONS = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mfma", "-mf16c")

# The best first.
LEVELS = (
    Level("avx512bf16", (*_AVX512_OPTIONS, "-mavx512bf16"), _AVX512 | {"avx512_bf16"}),
    Level("avx512", _AVX512_OPTIONS, _AVX512),
    Level("avx2", ("-mavx2", "-mfma", "-mf16c"), _AVX2),
    Level("portable", (), frozenset()),
)


def levels_here() -> tuple[Level, ...]:
    """The levels that this CPU can run, the best first. The portable one always is the last."""
    flags = _cpu_flags()
    return tuple(level for level in LEVELS if level.needs <= flags)


def best_level() -> Level:
    return levels_here()[0]


def levels_of_this_architecture() -> tuple[Level, ...]:
    """The levels that a compiler here can make libraries for, whatever this CPU itself can run."""
    return LEVELS if platform.machine() in ("x86_64", "AMD64") else LEVELS[-1:]


@cache
def _cpu_flags() -> frozenset[str]:
    """Return the flags of this CPU; none where the system does not tell them, or it is no x86."""
    try:
        lines = _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    found = (line.partition(":")[2].split() for line in lines if line.startswith("flags"))
    return frozenset(next(found, []))


_NAMES = ("c++", "g++", "clang++")
_GUARD = Path(__file__).with_name("guard.py")
# A compiler that does not even say its name by then will not compile.
_VERSION_S = 20.0
# For one file of the sources: the largest takes about ten seconds of a core, and the machine may be busy.
COMPILE_S = 180.0


class BuildError(Exception):
    """There is no compiler, it refused the sources, or there is no safe place for a library. One line."""


def find_compiler() -> tuple[str, ...]:
    """The C++ compiler as words of a command: `$CXX`, such as `ccache g++`, or the first of c++, g++ and
    clang++ on the path. Raises BuildError if there is none.
    """
    chosen = os.environ.get("CXX")
    if not chosen:
        if (found := _first_there()) is None:
            raise BuildError("no C++ compiler is here: install g++, or set CXX to its command")
        return (found,)
    try:
        words = shlex.split(chosen)
    except ValueError:
        words = []
    program = shutil.which(words[0]) if words else None
    if program is None:
        other = _first_there()
        instead = f"unset it to use {other}" if other is not None else "install g++"
        raise BuildError(
            f"CXX is {chosen[:200]!r}, which is no command here: {instead}, or set it to another"
        )
    return (program, *words[1:])


def _first_there() -> str | None:
    return next((program for name in _NAMES if (program := shutil.which(name))), None)


def identity(compiler: Sequence[str]) -> bytes:
    """Identify a compiler: its output of --version, and the words that it is called with."""
    return " ".join([run([*compiler, "--version"], _VERSION_S), *compiler[1:]]).encode()


def run(command: Sequence[str], limit_s: float = COMPILE_S) -> str:
    """The output of a command. Raises BuildError if it fails, or has not ended after `limit_s` seconds.

    It ends with this process, and so do its children.
    """
    theirs, ours = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_GUARD), *command],
            stdin=theirs,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # Compilers complain in the encoding of their locale.
            errors="replace",
        )
    except OSError as error:
        os.close(ours)
        raise BuildError(f"{command[0]} did not run: {error.strerror}") from error
    finally:
        os.close(theirs)
    # Children that it left may hold its output open: leaving the block closes this end and waits for the
    # process alone.
    with process:
        try:
            output, complaints = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            raise BuildError(
                f"{command[0]} was given up: {_shown(command)} had not ended after {limit_s:g} s"
            ) from None
        finally:
            # Ends what still runs.
            os.close(ours)
    if process.returncode != 0:
        complaint = next((line for line in complaints.splitlines() if "error" in line), "it said nothing")
        raise BuildError(f"{command[0]} failed: {complaint.strip()}")
    return output


def _shown(command: Sequence[str]) -> str:
    """A command's purpose, in a word or two."""
    sources = [Path(word).name for word in command if word.endswith(".cpp")]
    return sources[0] if sources else command[-1] if command[-1].startswith("--") else "the link"


log = get_logger(__name__)

# Libraries that stay in the cache, of all versions together.
_KEPT = 32
_DIGEST_BYTES = hashlib.sha256().digest_size


def kernel_directory(cache: Path | None) -> Path:
    """Return the folder of built libraries: `cache`, `$CATENARY_CACHE` or ~/.cache/catenary, and below it.

    Raises BuildError for a user without a home, as a container may have one.
    """
    if cache is not None:
        return cache / "native"
    try:
        return cache_directory() / "native"
    except NoHomeError as error:
        raise BuildError(str(error)) from None


def seal(library: Path, name: str) -> None:
    """Put the digest behind a library that is to be kept as `name`, which no other user may change then."""
    with library.open("r+b") as file:
        digest = _digest(name, file.read())
        file.write(digest)
    # Whatever the umask: with the one of many systems the user's group may write to new files.
    library.chmod(0o755)


def make_directory(directory: Path) -> None:
    """Make it for this user alone, if it is not there; its parents, as the umask says."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    directory.mkdir(mode=0o700, exist_ok=True)


def sound(places: Sequence[Path], pattern: str) -> list[Path]:
    """Return the libraries of these directories that are whole, can be loaded, and are no other user's."""
    usable = (place for place in places if is_ours(place) and not forbids_code(place))
    found = (path for place in usable for path in sorted(place.glob(pattern)))
    return [path for path in found if is_ours(path) and _is_whole(path)]


def is_ours(path: Path) -> bool:
    """Return whether this user or root owns the path, and neither its group nor others may write to it."""
    try:
        status = path.stat()
    except OSError:
        return False
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def drop_the_oldest(directory: Path) -> None:
    """Every version of the sources leaves its libraries here; the cache must not grow for ever."""
    libraries = sorted(directory.glob("*.so"), key=lambda path: path.stat().st_mtime, reverse=True)
    for library in libraries[_KEPT:]:
        library.unlink(missing_ok=True)


def _is_whole(path: Path) -> bool:
    try:
        data = path.read_bytes()
    except OSError:
        return False
    whole = data[-_DIGEST_BYTES:] == _digest(path.name, data[:-_DIGEST_BYTES])
    if not whole:
        log.warning("a library of the CPU's kernels is damaged and not used", path=str(path))
    return whole


def _digest(name: str, content: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\0" + content).digest()


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
    """Return the libraries next to the sources, in `directory`, and in the folder of `make setup`."""
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
