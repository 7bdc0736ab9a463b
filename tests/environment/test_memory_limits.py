"""Limits of memory by real control groups and by ulimit: seen, and named where they end a process."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from catenary.cgroups import groups_of
from services.engine.servicer.core import CoreStartError, ProcessCore, spawn_process

MIB = 1 << 20
LIMITS = ("memory.max", "memory.limit_in_bytes")

MakeGroup = Callable[[int], Path]


@pytest.fixture
def memory_group() -> Iterator[MakeGroup]:
    """Makes a group below this process's own with so many bytes, as `memory_group(limit)`."""
    with ExitStack() as made:

        def make(limit: int) -> Path:
            for parent in groups_of(Path("/"), "memory"):
                group = parent / f"catenary-test-{os.getpid()}"
                try:
                    group.mkdir()
                except OSError:
                    continue
                made.callback(group.rmdir)
                for name in LIMITS:
                    if (group / name).exists():
                        (group / name).write_text(str(limit))
                        return group
            pytest.skip("no control group with a limit of memory can be made here: that needs root")

        yield make


def run_in(group: Path, program: str) -> str:
    """What a Python program in the group says."""
    enter = f"open({str(group / 'cgroup.procs')!r}, 'w').write('0')\n"
    done = subprocess.run(
        [sys.executable, "-c", enter + program], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_limit_of_a_nested_group_is_the_memory_that_an_engine_sees(memory_group: MakeGroup) -> None:
    group = memory_group(900 * MIB)
    seen = run_in(
        group,
        "from services.engine.device.memory import host_memory\n"
        "figures = host_memory()\n"
        "print(figures.total, figures.free)",
    )
    total, free = map(int, seen.split())
    assert total == 900 * MIB
    assert 0 < free < total


CORE_THAT_GROWS = ("-c", "x = bytearray(400 << 20)")


def test_a_core_that_outgrows_its_group_is_said_to_have_done_so(memory_group: MakeGroup) -> None:
    group = memory_group(256 * MIB)
    told = run_in(
        group,
        "import asyncio, sys\n"
        "from services.engine.servicer.core import CoreStartError\n"
        "from services.engine.servicer.core import ProcessCore, spawn_process\n"
        f"command = (sys.executable, *{CORE_THAT_GROWS!r})\n"
        "async def main():\n"
        "    core = ProcessCore(b'{}', stop_s=1, spawn=spawn_process(None, command))\n"
        "    try:\n"
        "        await core.start(lambda progress: None)\n"
        "    except CoreStartError as error:\n"
        "        print(error)\n"
        "    finally:\n"
        "        await core.stop()\n"
        "asyncio.run(main())",
    )
    assert "killed by SIGKILL: probably the memory limit of 256 MiB was reached" in told
    assert str(group) in told


async def test_a_core_that_is_killed_by_hand_is_not_said_to_lack_memory() -> None:
    command = (sys.executable, "-c", "import os; os.kill(os.getpid(), 9)")
    core = ProcessCore(b"{}", stop_s=1, spawn=spawn_process(None, command))
    try:
        with pytest.raises(CoreStartError, match=r"was killed by SIGKILL$"):
            await asyncio.wait_for(core.start(lambda progress: None), 30)
    finally:
        await core.stop()


def test_a_tokenizer_that_lacks_address_space_says_so(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", "-c", f"ulimit -v 400000; exec {sys.executable} -c '{STARTED_WORKER}'"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert "address space ran out, which is limited to 390 MiB (ulimit -v)" in done.stdout, done.stderr


STARTED_WORKER = """
import asyncio
from unittest import mock
from services.tokenizer.workers import pool
async def main():
    command = ("/bin/sh", "-c", "exit 1")
    with mock.patch.object(pool, "module_command", lambda module: command):
        try:
            await pool.WorkerProcess.start(b"x")
        except pool.WorkerLost as lost:
            print(lost)
asyncio.run(main())
"""
