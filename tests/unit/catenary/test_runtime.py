from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from catenary.runtime import module_command
from tests.support.repository import ROOT

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


def test_a_closed_terminal_asks_for_the_end_as_well() -> None:
    process = start(
        """
        import signal
        # Whoever runs the tests may have it ignored.
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        async def main(stop):
            print("up", flush=True)
            await stop.wait()
        run(main)
        """
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGHUP)
    assert process.wait(30) == 0


def test_a_hangup_that_is_ignored_stays_so() -> None:
    process = start(
        """
        import signal
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        async def main(stop):
            print("up", flush=True)
            await stop.wait()
            print(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN, flush=True)
        run(main)
        """
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    assert process.stdout.readline() == "True\n"


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_are_no_reason_to_abort(closed: str, tmp_path: Path) -> None:
    done = tmp_path / "done"
    body = PROLOGUE + textwrap.dedent(
        f"""
        async def main(stop):
            assert [sys.stdin.fileno(), sys.stdout.fileno(), sys.stderr.fileno()] == [0, 1, 2]
            print("a line")
            print("a line", file=sys.stderr)
            process = await asyncio.create_subprocess_exec("true")
            open({str(done)!r}, "w").write(str(await process.wait()))
        run(main)
        """
    )
    command = f"exec {shlex.quote(sys.executable)} -c {shlex.quote(body)} {closed}"
    assert subprocess.run(["sh", "-c", command], check=False, timeout=60).returncode == 0
    assert done.read_text() == "0"


def test_a_character_that_the_encoding_lacks_is_written_as_an_escape() -> None:
    body = PROLOGUE + textwrap.dedent(
        """
        async def main(stop):
            print("m\\u00fcll")
            raise StartRefused("no directory m\\u00fcll")
        run(main)
        """
    )
    process = subprocess.run(
        [sys.executable, "-c", body],
        capture_output=True,
        check=False,
        timeout=60,
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )
    assert process.returncode == 1
    assert process.stdout == b"m\\xfcll\n"
    assert process.stderr.endswith(b": no directory m\\xfcll\n")


@pytest.mark.parametrize("module", ["services.tokenizer.workers", "services.engine.core", "gateway"])
def test_children_import_nothing_of_the_working_directory(module: str, tmp_path: Path) -> None:
    for name in ("json.py", "types.py", "numpy.py"):
        (tmp_path / name).write_text("raise SystemExit('of the working directory')")
    for name in ("services", "gateway", "catenary"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('of the working directory')")
    ours = ROOT
    code = (
        "import os, subprocess; from catenary.runtime import module_command; "
        f"os.chdir({str(tmp_path)!r}); "
        f"subprocess.run([*module_command({module!r}), '--help'], check=False)"
    )
    result = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=os.environ | {"PYTHONPATH": str(ours)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "of the working directory" not in result.stdout + result.stderr


def test_a_checkout_that_is_not_installed_finds_its_own_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = ROOT
    monkeypatch.chdir(ours)
    monkeypatch.setattr(sys, "path", [str(ours), *sys.path])
    assert module_command("gateway")[1:] == ("-m", "gateway")
    # A command that is installed, whichever directory it is called in.
    monkeypatch.setattr(sys, "path", [str(Path(sys.executable).parent), *sys.path])
    assert module_command("gateway")[1:] == ("-P", "-m", "gateway")
    monkeypatch.chdir("/")
    assert module_command("gateway")[1:] == ("-P", "-m", "gateway")


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


def test_a_service_opens_as_many_files_as_the_system_allows() -> None:
    process = start(
        """
        import resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 512))
        async def main(stop):
            print(*resource.getrlimit(resource.RLIMIT_NOFILE), flush=True)
        run(main)
        """
    )
    assert process.communicate(timeout=30)[0] == "512 512\n"
