from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from catenary.runtime import StartRefused
from catenary_apps.up.child import wrapped
from catenary_apps.up.plan import ChildSpec, Stage
from catenary_apps.up.reporter import PlainReporter
from catenary_apps.up.supervisor import ChildLog, ChildProcess, Supervisor, describe_exit, reap_orphans

WAIT_S = 20.0
SLEEPER = "import time\nprint('up', flush=True)\ntime.sleep(600)"
STUBBORN = (
    "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up', flush=True)\n" + SLEEPER
)


class RecordingReporter(PlainReporter):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def line(self, text: str) -> None:
        self.lines.append(text)


def spec(name: str, code: str, stage: Stage = Stage.FLEET) -> ChildSpec:
    return ChildSpec(name=name, command=(sys.executable, "-c", code), stage=stage)


def make(tmp_path: Path, *specs: ChildSpec, drain_s: float = 5) -> tuple[Supervisor, RecordingReporter]:
    reporter = RecordingReporter()
    return Supervisor(specs, reporter=reporter, log_dir=tmp_path, drain_s=drain_s, verbose=False), reporter


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


async def nothing() -> None:
    pass


def test_exits_are_described() -> None:
    assert describe_exit(3) == "ended with exit code 3"
    assert describe_exit(3, "out of memory") == "ended with exit code 3: out of memory"
    assert describe_exit(1, "services.engine: no room") == "ended with exit code 1: no room"
    assert describe_exit(2, "python -m gateway: --port: bad") == "ended with exit code 2: --port: bad"
    assert len(describe_exit(3, "x" * 10_000)) < 500
    assert describe_exit(-signal.SIGKILL, "loading") == "was ended by SIGKILL"


def test_the_first_process_of_a_container_takes_leave_of_orphans() -> None:
    code = """
import ctypes, os, subprocess, sys, time
from pathlib import Path
from catenary_apps.up.supervisor import reap_orphans
PR_SET_CHILD_SUBREAPER = 36
ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
own = subprocess.Popen(["sleep", "0"])
# A child that ends before what it has started itself.
orphan = int(subprocess.check_output(["sh", "-c", "sleep 0 >/dev/null & echo $!"]))
state = lambda pid: Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
while state(own.pid) != "Z" or state(orphan) != "Z":
    time.sleep(0.01)
assert reap_orphans({own.pid, None}) == [orphan]
assert reap_orphans({own.pid, None}) == []
assert own.wait() == 0
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


async def test_killed_child_is_started_again_and_all_end(tmp_path: Path) -> None:
    supervisor, reporter = make(tmp_path, spec("a", SLEEPER), spec("b", SLEEPER, Stage.TOKENIZER))
    stop = asyncio.Event()
    running = asyncio.create_task(supervisor.run(stop, nothing))
    first, second = supervisor.children
    await until(lambda: first.last_line and second.last_line)
    supervisor.mark_ready()
    killed = first.pid
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    await until(lambda: first.pid not in (None, killed))
    assert any("a was ended by SIGKILL; starting it again in 0.5 s" in line for line in reporter.lines)
    pids = [first.pid, second.pid]
    stop.set()
    await asyncio.wait_for(running, WAIT_S)
    assert not any(alive(pid) for pid in pids if pid is not None)


async def test_child_that_was_drained_is_started_again_as_if_for_the_first_time(tmp_path: Path) -> None:
    supervisor, reporter = make(tmp_path, spec("a", "import time\nprint('up', flush=True)\ntime.sleep(0.2)"))
    stop = asyncio.Event()
    running = asyncio.create_task(supervisor.run(stop, nothing))
    supervisor.mark_ready()
    await until(lambda: len(reporter.lines) == 3)
    stop.set()
    await asyncio.wait_for(running, WAIT_S)
    # A crash would wait longer each time.
    assert all("ended with exit code 0; starting it again in 0.5 s" in line for line in reporter.lines)


async def test_child_that_ignores_the_drain_is_killed_with_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("catenary_apps.up.supervisor.STOP_MARGIN_S", 0.2)
    parent = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {STUBBORN!r}])\n{STUBBORN}"
    supervisor, reporter = make(tmp_path, spec("a", parent), drain_s=0)
    stop = asyncio.Event()
    running = asyncio.create_task(supervisor.run(stop, nothing))
    (child,) = supervisor.children
    # Both print twice: the child process's own start, and the one it spawned.
    await until(lambda: child.log.path.read_text().count("up") >= 4)
    group = child.pid
    assert group is not None
    stop.set()
    await asyncio.wait_for(running, WAIT_S)
    assert any("a was killed" in line for line in reporter.lines)
    await until(lambda: not group_exists(group))


def group_exists(group: int) -> bool:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(fields[2]) == group and fields[0] != "Z":
                return True
    return False


async def test_child_told_to_end_while_it_starts_ends(tmp_path: Path) -> None:
    late = spec("late", SLEEPER)
    process = ChildProcess(late, ChildLog(tmp_path / "late.log"), lambda _name, _line: None)
    running = asyncio.create_task(process.run())
    await asyncio.sleep(0)
    assert process.pid is None
    process.terminate()
    assert await asyncio.wait_for(running, 10) == -signal.SIGTERM
    process.log.close()


async def refusal_of(supervisor: Supervisor) -> str:
    with pytest.raises(BaseExceptionGroup) as raised:
        await asyncio.wait_for(supervisor.run(asyncio.Event(), nothing), WAIT_S)
    refusals = raised.value.subgroup(StartRefused)
    assert refusals is not None
    return str(refusals.exceptions[0])


@pytest.mark.parametrize("code", [1, 2])
async def test_a_refusal_before_anything_served_ends_the_start_with_its_reason(
    code: int, tmp_path: Path
) -> None:
    last = "services.engine: --max-model-len 99 exceeds the model's context"
    program = f"import sys\nprint('loading')\nprint({last!r}, file=sys.stderr)\nsys.exit({code})"
    supervisor, reporter = make(tmp_path, spec("engine-0", program), spec("b", SLEEPER))
    text = await refusal_of(supervisor)
    reason = "engine-0: --max-model-len 99 exceeds the model's context"
    assert text == f"{reason} (log: {tmp_path}/engine-0.log)"
    assert reporter.lines == []
    assert supervisor.children[1].pid is None


async def test_a_crash_before_anything_served_is_tried_again_and_then_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("catenary_apps.up.supervisor.FIRST_DELAY_S", 0.01)
    program = "import os, signal\nprint('loading')\nos.kill(os.getpid(), signal.SIGKILL)"
    supervisor, reporter = make(tmp_path, spec("a", program))
    assert (await refusal_of(supervisor)).startswith("a: was ended by SIGKILL (log: ")
    assert [line.split(";")[0] for line in reporter.lines] == ["a was ended by SIGKILL"] * 2


async def test_what_served_is_started_again_after_a_refusal_and_the_reason_is_told(tmp_path: Path) -> None:
    supervisor, reporter = make(tmp_path, spec("a", "import sys\nsys.exit('services.engine: no room')"))
    stop = asyncio.Event()
    supervisor.mark_ready()
    running = asyncio.create_task(supervisor.run(stop, nothing))
    await until(lambda: reporter.lines)
    assert reporter.lines[0].startswith(
        "a ended with exit code 1: no room; starting it again in 0.5 s (log: "
    )
    stop.set()
    await asyncio.wait_for(running, WAIT_S)


def test_child_dies_with_a_killed_parent() -> None:
    code = (
        "import subprocess, sys, time\n"
        "from catenary_apps.up.child import wrapped\n"
        "child = subprocess.Popen(wrapped((sys.executable, '-c', 'import time; time.sleep(600)')))\n"
        "print(child.pid, flush=True)\ntime.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert alive(pid)
        parent.kill()
        parent.wait(WAIT_S)
    asyncio.run(until(lambda: not alive(pid)))


def test_wrapper_ends_if_its_parent_is_gone() -> None:
    command = list(wrapped((sys.executable, "-c", "print('ran')")))
    command[command.index(str(os.getpid()))] = "1"
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 1
    assert done.stdout == ""


def test_log_keeps_one_older_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("catenary_apps.up.supervisor.LOG_LIMIT_BYTES", 100)
    log = ChildLog(tmp_path / "a.log")
    for index in range(100):
        log.write(f"line {index}")
    log.close()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.log", "a.log.1"]
    assert all(file.stat().st_size <= 110 for file in tmp_path.iterdir())


def test_a_log_that_cannot_be_renewed_is_renewed_once_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("catenary_apps.up.supervisor.LOG_LIMIT_BYTES", 10)
    log = ChildLog(tmp_path / "logs" / "a.log")
    shutil.rmtree(tmp_path / "logs")
    for line in ("a first long line", "a second line"):
        log.write(line)
    (tmp_path / "logs").mkdir()
    log.write("a third line")
    log.write("the fourth line")
    log.close()
    assert (tmp_path / "logs" / "a.log.1").read_text() == "the fourth line\n"


def test_reaping_goes_on_past_a_thread_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    listed = list(Path("/proc/self/task").glob("*/children"))
    monkeypatch.setattr(Path, "glob", lambda *_: iter([Path("/proc/self/task/0/children"), *listed]))
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    others = [int(pid) for file in listed for pid in file.read_text().split() if int(pid) != child.pid]
    assert reap_orphans(others) == [child.pid]


def test_log_that_cannot_be_written_is_refused_at_first_and_left_out_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.log.1").mkdir()
    (tmp_path / "a.log").touch()
    with pytest.raises(StartRefused, match=r"a\.log cannot be written: Is a directory"):
        ChildLog(tmp_path / "a.log")
    full = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115
    monkeypatch.setattr(Path, "open", lambda *_, **__: full)
    log = ChildLog(tmp_path / "b.log")
    log.write("line")
    log.close()
