from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

PROLOGUE = """
import asyncio, sys
from catenary.runtime import StartRefused, mark_started, run
"""


def start(body: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROLOGUE + textwrap.dedent(body)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_returned_code_is_the_exit_code() -> None:
    process = start(
        """
        async def main(stop):
            import uvloop
            mark_started()
            assert isinstance(asyncio.get_running_loop(), uvloop.Loop)
            return 7
        run(main)
        """
    )
    assert process.wait(30) == 7


def test_the_first_signal_asks_and_the_second_forces() -> None:
    process = start(
        """
        async def main(stop):
            print("up", flush=True)
            await stop.wait()
            print("stopping", flush=True)
            await asyncio.sleep(60)
        run(main)
        """
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "stopping\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130


def test_a_stop_ends_with_zero() -> None:
    process = start(
        """
        async def main(stop):
            print("up", flush=True)
            await stop.wait()
        run(main)
        """
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0


def test_a_refused_start_is_one_line_even_from_a_task_group() -> None:
    process = start(
        """
        async def refuse():
            raise StartRefused("the model directory is missing")
        async def main(stop):
            async with asyncio.TaskGroup() as group:
                group.create_task(refuse())
        run(main)
        """
    )
    _, error = process.communicate(timeout=30)
    assert process.returncode == 1
    assert error.count("\n") == 1
    assert error.endswith(": the model directory is missing\n")


def test_a_defect_keeps_its_traceback() -> None:
    process = start(
        """
        async def main(stop):
            raise KeyError("defect")
        run(main)
        """
    )
    _, error = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "Traceback" in error
