"""`catenary up` as the first process of a container, and without standard streams."""

from __future__ import annotations

import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import httpx2
import pytest

from tests.support.service_process import clean_environment
from tests.support.up import MODEL, free_port, wait_for

NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
CLOSED = "<&- >&- 2>&-"
# Its child leaves a process in a session of its own and is killed; the one that takes its place stays.
SUPERVISOR = """
import asyncio, os, sys
from pathlib import Path
from catenary_apps.up.plan import ChildSpec, Stage
from catenary_apps.up.reporter import PlainReporter
from catenary_apps.up.supervisor import Supervisor

scratch = Path(sys.argv[1])
CHILD = '''
import os, signal, subprocess, sys, time
from pathlib import Path
note = Path(sys.argv[1])
if note.exists():
    time.sleep(600)
orphan = subprocess.Popen(["sleep", "0.1"], start_new_session=True)
note.with_suffix(".part").write_text(str(orphan.pid))
note.with_suffix(".part").rename(note)
os.kill(os.getpid(), signal.SIGKILL)
'''

async def nothing():
    pass

async def main():
    assert os.getpid() == 1
    note = scratch / "orphan"
    spec = ChildSpec(name="a", command=(sys.executable, "-c", CHILD, str(note)), stage=Stage.FLEET)
    supervisor = Supervisor((spec,), reporter=PlainReporter(), log_dir=scratch, drain_s=5, verbose=False)
    supervisor.mark_ready()
    stop = asyncio.Event()
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        group.create_task(supervisor.run(stop, nothing))
        while not note.exists():
            await asyncio.sleep(0.02)
        while Path("/proc", note.read_text()).exists():
            await asyncio.sleep(0.02)
        stop.set()
    print("reaped", flush=True)

asyncio.run(main())
"""


@cache
def why_not() -> str:
    """The reason for which no namespace of process ids can be made here; empty if one can be."""
    try:
        subprocess.run([*NAMESPACE, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return "no namespace of process ids can be made here: that needs root's CAP_SYS_ADMIN"
    return ""


def test_what_a_killed_service_leaves_behind_is_no_zombie_of_the_first_process(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    done = subprocess.run(
        [*NAMESPACE, sys.executable, "-c", SUPERVISOR, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    assert "a was ended by SIGKILL; starting it again" in done.stdout
    assert done.stdout.endswith("reaped\n")


def test_help_without_standard_streams_ends_well() -> None:
    command = f"exec {shlex.quote(sys.executable)} -m catenary_apps.cli.main up --help {CLOSED}"
    done = subprocess.run(["sh", "-c", command], check=False, timeout=60, env=clean_environment())
    assert done.returncode == 0


@pytest.mark.long
@pytest.mark.model
def test_a_deployment_without_standard_streams_serves(tmp_path: Path) -> None:
    port = free_port()
    options = f"--port {port} --router-port 0 --tokenizer-port 0 --log-dir {shlex.quote(str(tmp_path))}"
    command = f"exec {shlex.quote(sys.executable)} -m catenary_apps.cli.main up {options} {CLOSED}"
    environment = clean_environment() | {"CATENARY_ENGINE_SCRIPT": "default"}
    process = subprocess.Popen(["sh", "-c", command], env=environment)

    def is_served() -> bool:
        assert process.poll() is None
        try:
            response = httpx2.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=30)
        except httpx2.TransportError:
            return False
        return response.is_success

    body = {"model": MODEL, "prompt": "Hello", "max_tokens": 2}
    try:
        wait_for(is_served, 150)
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait(10)
