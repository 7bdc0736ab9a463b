"""The native kernels' libraries are built once, by whatever compiler is there, and refused in one line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from catenary.cpus import read_topology
from services.engine.device.cpu.native import (
    LEVELS,
    BuildError,
    best_level,
    build,
    find_compiler,
    levels_here,
    open_library,
)
from services.engine.device.cpu.native.building import kernel_directory

PORTABLE = LEVELS[-1]
# Writes a word to each output file, and a line to a log for each link.
COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo "compiler {version}"; exit 0; fi
for last; do :; done
case "$1" in -shared) echo linked >>"{log}" ;; esac
echo made >"$last"
"""


@pytest.fixture(autouse=True)
def no_library_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CATENARY_CACHE", str(tmp_path / "machine"))
    monkeypatch.setattr(
        "services.engine.device.cpu.native.building.BUILT", tmp_path / "came with the sources"
    )


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return write_compiler(tmp_path, monkeypatch, COMPILER.format(version=1, log=tmp_path / "log"))


def write_compiler(directory: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> Path:
    path = directory / "cxx"
    path.write_text(text)
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    return path


def links(directory: Path) -> int:
    return (directory / "log").read_text().count("linked")


def test_library_is_built_once_by_all_who_ask_at_once(tmp_path: Path, compiler: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: build(PORTABLE, tmp_path / "kept"), range(8)))
    assert len(set(paths)) == 1
    assert paths[0].read_bytes().startswith(b"made\n")
    assert links(tmp_path) == 1
    assert sorted(path.name for path in paths[0].parent.iterdir()) == [".lock", paths[0].name]


def test_whoever_waits_is_told_how_far_it_is(tmp_path: Path, compiler: Path) -> None:
    told: list[str] = []
    build(PORTABLE, tmp_path / "kept", told.append)
    total = len(told) - 1
    once = told[0]
    assert once.startswith("compiling the CPU's kernels, once for this machine (about a minute")
    assert told[1:] == [f"{once}: {done} of {total} files" for done in range(1, total + 1)]
    assert total > 1
    told.clear()
    build(PORTABLE, tmp_path / "kept", told.append)
    assert told == []


def test_another_compiler_builds_anew(
    tmp_path: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build(PORTABLE, tmp_path / "kept")
    write_compiler(tmp_path, monkeypatch, COMPILER.format(version=2, log=tmp_path / "log"))
    assert build(PORTABLE, tmp_path / "kept") != first
    assert links(tmp_path) == 2


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut off": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "garbage": lambda data: bytes(len(data)),
    "one bit": lambda data: bytes([data[0] ^ 1]) + data[1:],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_library_is_built_anew_by_one_of_those_who_find_it(
    damage: str, tmp_path: Path, compiler: Path
) -> None:
    kept = tmp_path / "kept"
    made = build(PORTABLE, kept)
    whole = made.read_bytes()
    made.write_bytes(DAMAGES[damage](whole))
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(lambda _: build(PORTABLE, kept), range(8))) == {made}
    assert made.read_bytes() == whole
    assert links(tmp_path) == 2


def test_a_library_of_another_machine_or_version_under_this_name_is_built_anew(
    tmp_path: Path, compiler: Path
) -> None:
    kept = tmp_path / "kept"
    made, other = build(PORTABLE, kept), build(LEVELS[0], kept)
    made.write_bytes(other.read_bytes())
    assert build(PORTABLE, kept) == made
    assert made.read_bytes() != other.read_bytes()


def test_a_damaged_library_is_none_where_no_compiler_is(
    tmp_path: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = build(PORTABLE, tmp_path / "kept")
    made.write_bytes(made.read_bytes()[:-1])
    monkeypatch.setenv("CXX", str(tmp_path / "nothing"))
    with pytest.raises(BuildError, match=r"CXX is '.*/nothing', which is no command here"):
        build(PORTABLE, tmp_path / "kept")


def test_a_compiler_may_be_several_words(
    tmp_path: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", f"env 'NAME=two words' {compiler}")
    assert find_compiler()[1:] == ("NAME=two words", str(compiler))
    first = build(PORTABLE, tmp_path / "kept")
    monkeypatch.setenv("CXX", str(compiler))
    assert build(PORTABLE, tmp_path / "kept") != first
    for broken in ("'", "   ", "no-such-program g++"):
        monkeypatch.setenv("CXX", broken)
        with pytest.raises(BuildError, match=r"CXX is .*, which is no command here"):
            find_compiler()


def test_levels_have_libraries_of_their_own(tmp_path: Path, compiler: Path) -> None:
    assert len({build(level, tmp_path / "kept") for level in LEVELS}) == len(LEVELS)


def test_without_a_compiler_a_library_of_these_sources_does(
    tmp_path: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.engine.device.cpu.native.building.BUILT", tmp_path / "built")
    made = build(PORTABLE, tmp_path / "kept")
    monkeypatch.setenv("CXX", str(tmp_path / "nothing"))
    assert build(PORTABLE, tmp_path / "kept") == made
    with pytest.raises(BuildError, match=r"CXX is '.*/nothing', which is no command here"):
        build(PORTABLE, tmp_path / "other")
    (tmp_path / "kept").rename(tmp_path / "built")
    assert build(PORTABLE, tmp_path / "other").parent == tmp_path / "built"


def test_refusals_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    complains = "#!/bin/sh\n[ $1 = --version ] || { echo 'a.cpp:1: error: no such type' >&2; exit 1; }\n"
    write_compiler(tmp_path, monkeypatch, complains)
    with pytest.raises(BuildError, match=r"failed: a\.cpp:1: error: no such type$"):
        build(PORTABLE, tmp_path / "kept")
    assert [path.name for path in (tmp_path / "kept").iterdir()] == [".lock"]
    latin = "#!/bin/sh\n[ $1 = --version ] || { printf 'error: unzul\\344ssig' >&2; exit 1; }\n"
    write_compiler(tmp_path, monkeypatch, latin)
    with pytest.raises(BuildError, match=r"failed: error: unzul\ufffdssig$"):
        build(PORTABLE, tmp_path / "kept")
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match="cannot keep the kernels"):
        build(PORTABLE, tmp_path / "file" / "kept")


def test_a_user_without_a_home_keeps_them_where_told(
    tmp_path: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def homeless(_: int) -> None:
        raise KeyError("uid not found")

    monkeypatch.delenv("CATENARY_CACHE")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", homeless)
    assert build(PORTABLE, kernel_directory(tmp_path)).parent == tmp_path / "native"
    with pytest.raises(BuildError, match="set HOME or CATENARY_CACHE"):
        open_library(PORTABLE)


def test_what_cannot_be_loaded_is_refused(
    tmp_path: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BuildError, match="cannot be loaded"):
        open_library(PORTABLE, cache=tmp_path)


def test_old_libraries_are_dropped(tmp_path: Path, compiler: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    for age in range(40):
        (kept / f"avx2-{age}.so").write_text("")
        os.utime(kept / f"avx2-{age}.so", (1000 - age, 1000 - age))
    built = build(PORTABLE, kept)
    left = {path.name for path in kept.glob("*.so")}
    assert left == {built.name, *(f"avx2-{age}.so" for age in range(31))}


def test_what_setup_built_serves_engines_with_a_cache_of_their_own(tmp_path: Path, compiler: Path) -> None:
    made = build(PORTABLE, kernel_directory(None))
    assert build(PORTABLE, tmp_path / "kept") == made
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777], ids=oct)
def test_no_library_is_taken_from_where_others_write(mode: int, tmp_path: Path, compiler: Path) -> None:
    kept = tmp_path / "kept"
    made = build(PORTABLE, kept)
    made.chmod(mode)
    assert build(PORTABLE, kept).stat().st_mode & 0o777 == 0o755
    assert links(tmp_path) == 2
    kept.chmod(mode)
    with pytest.raises(BuildError, match="others may write to it"):
        build(PORTABLE, kept)


def test_an_umask_that_lets_a_group_write_does_no_harm(tmp_path: Path, compiler: Path) -> None:
    # A volume of a container may be so as well: what is in it is ours alone.
    volume = tmp_path / "volume"
    volume.mkdir()
    volume.chmod(0o2775)
    before = os.umask(0o002)
    try:
        made = build(PORTABLE, volume / "cache" / "native")
    finally:
        os.umask(before)
    assert build(PORTABLE, volume / "cache" / "native") == made
    assert links(tmp_path) == 1
    assert made.parent.stat().st_mode & 0o022 == 0


def test_no_library_is_taken_from_another_user(
    tmp_path: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = build(PORTABLE, tmp_path / "kept")
    monkeypatch.setattr(os, "geteuid", lambda: made.stat().st_uid + 1)
    if made.stat().st_uid == 0:
        os.chown(made.parent, 4711, -1)
    with pytest.raises(BuildError, match="another user's"):
        build(PORTABLE, tmp_path / "kept")


def test_a_cache_that_cannot_be_looked_into_is_a_refusal(
    tmp_path: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, look = tmp_path / "kept", Path.stat

    def refuse(path: Path, **options: bool) -> os.stat_result:
        if path.is_relative_to(kept):
            raise PermissionError(13, "Permission denied", str(path))
        return look(path, **options)

    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(BuildError, match="another user's"):
        build(PORTABLE, kept)


def test_a_compiler_that_does_not_run_is_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_compiler(tmp_path, monkeypatch, "no program")
    (tmp_path / "cxx").write_bytes(b"\x7fELF")
    with pytest.raises(BuildError, match="failed: error: Exec format error"):
        build(PORTABLE, tmp_path / "kept")


def test_a_variable_that_names_no_compiler_is_named_with_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(BuildError, match=r"^no C\+\+ compiler is here: install g\+\+, or set CXX"):
        find_compiler()
    monkeypatch.setenv("CXX", "/no/such")
    with pytest.raises(BuildError, match=r"^CXX is '/no/such', which is no command here: install g\+\+"):
        find_compiler()
    (programs / "g++").write_text("#!/bin/sh\n")
    (programs / "g++").chmod(0o755)
    with pytest.raises(BuildError, match=rf"here: unset it to use {programs}/g\+\+"):
        find_compiler()
    monkeypatch.delenv("CXX")
    assert find_compiler() == (str(programs / "g++"),)


def test_a_compiler_that_does_not_say_its_name_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_compiler(tmp_path, monkeypatch, "#!/bin/sh\nsleep 600\n")
    monkeypatch.setattr("services.engine.device.cpu.native.building._VERSION_S", 0.3)
    with pytest.raises(BuildError, match=r"cxx was given up: --version had not ended after 0\.3 s"):
        build(PORTABLE, tmp_path / "kept")


# Starts a program of its own for each file, as a compiler's driver does, and waits for it.
HANGS = """#!/bin/sh
if [ "$1" = --version ]; then echo "compiler 1"; exit 0; fi
sleep 600 &
echo $! >>"{log}"
wait
"""


def ended(log: Path) -> bool:
    """Whether all programs that were started have ended."""
    return not any(Path(f"/proc/{pid}").exists() for pid in log.read_text().split())


def test_a_compiler_that_hangs_is_given_up_at_its_first_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_compiler(tmp_path, monkeypatch, HANGS.format(log=tmp_path / "log"))
    with pytest.raises(BuildError, match=r"cxx was given up: \w+\.cpp had not ended after 1 s"):
        build(PORTABLE, tmp_path / "kept", limit_s=1.0)
    # No more than were begun at once.
    assert len((tmp_path / "log").read_text().split()) <= 2 * read_topology().limit
    until(lambda: ended(tmp_path / "log"))
    assert [path.name for path in (tmp_path / "kept").iterdir()] == [".lock"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_build_that_is_ended_leaves_no_compiler_running(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_compiler(tmp_path, monkeypatch, HANGS.format(log=tmp_path / "log"))
    program = (
        "from pathlib import Path\nfrom services.engine.device.cpu.native import LEVELS, build\n"
        f"build(LEVELS[-1], Path({str(tmp_path / 'kept')!r}))"
    )
    builder = subprocess.Popen([sys.executable, "-c", program])
    try:
        until(lambda: (tmp_path / "log").is_file() and (tmp_path / "log").read_text().endswith("\n"))
        builder.send_signal(number)
        assert builder.wait(30) == -number
        until(lambda: ended(tmp_path / "log"))
    finally:
        builder.kill()
        builder.wait()


def until(condition: Callable[[], bool], limit_s: float = 30.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_what_a_killed_builder_left_is_removed(tmp_path: Path, compiler: Path) -> None:
    (tmp_path / "kept" / ".building-1").mkdir(parents=True)
    made = build(PORTABLE, tmp_path / "kept")
    assert sorted(path.name for path in made.parent.iterdir()) == [".lock", made.name]


def test_every_cpu_has_a_level() -> None:
    assert levels_here()[-1] == PORTABLE
    assert best_level() == levels_here()[0]
