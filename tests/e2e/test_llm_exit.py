"""A program that uses an LLM ends as any other, closed or not: each test is a child interpreter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.repository import ROOT
from tests.support.tiny_llm import chat_model

# A hang is for ever: what ends does so within seconds, on a loaded machine within minutes.
ENDS_S = 240

HEAD = """
import sys, threading
from catenary import LLM, SamplingParams

def load():
    options = {"dtype": "float32", "device_threads": 1, "kv_cache_gib": 0.01, "max_num_seqs": 2}
    return LLM(sys.argv[1], progress=False, **options)

def ask(llm, tokens=4):
    return llm.generate("ab", SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True))[0].outputs[0]

llm = load()
assert len(ask(llm).token_ids) == 4
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("llm") / "tiny")


def start(model: Path, script: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HEAD + script, str(model)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def run(model: Path, script: str, code: int = 0) -> tuple[str, str]:
    """What a program wrote that ended by itself with this status."""
    process = start(model, script)
    try:
        out, err = process.communicate(timeout=ENDS_S)
    finally:
        process.kill()
    assert process.returncode == code, err
    return out, err


def test_a_script_ends_that_closes_nothing(model: Path) -> None:
    assert run(model, "print('end')") == ("end\n", "")


def test_the_end_waits_for_an_engine_that_has_just_become_garbage(model: Path) -> None:
    """As one does that is a local variable of main(). An abort of torch was the end of it now and then."""
    script = """
import asyncio
stack = llm._lifetime.stack
stop = stack.stop

async def slowly():
    await asyncio.sleep(1)
    await stop()
    print("stopped", flush=True)

stack.stop = slowly
del llm
print("end", flush=True)
"""
    assert run(model, script) == ("end\nstopped\n", "")


def test_the_end_waits_for_a_start_that_was_given_up(model: Path) -> None:
    """Its thread computes on, and finds an interpreter when it comes back from there: without one, torch's
    frames on its stack made glibc abort the process."""
    script = """
import os, signal, torch
import services.engine.core.process as process
from catenary.frames import LinkClosed

llm.close()

def start(options, progress):
    os.kill(os.getpid(), signal.SIGINT)
    ones = torch.ones(200, 200)
    while not threading._SHUTTING_DOWN:
        torch.mm(ones, ones)
    for _ in range(200):
        torch.mm(ones, ones)
    print("ended", flush=True)
    raise LinkClosed

process.start_engine = start
try:
    load()
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
    out, err = run(model, script)
    assert out == "interrupted\nended\n"
    assert "terminate" not in err


def test_several_and_a_thread_that_outlives_the_main_one(model: Path) -> None:
    """The thread finds a whole engine, although the interpreter has begun to end."""
    script = """
others = [load(), llm]

def work():
    # Until the interpreter is about to end.
    while not threading._SHUTTING_DOWN:
        pass
    for one in (*others, load()):
        print(len(ask(one, 20).token_ids), flush=True)

def watch():
    threading.main_thread().join()

threading.Thread(target=work).start()
threading.Thread(target=watch).start()
"""
    assert run(model, script) == ("20\n20\n20\n", "")


def test_garbage_gives_its_memory_back(model: Path) -> None:
    """In a cycle and on any thread: the collector's finalizer waits for nothing."""
    script = """
import gc, weakref

def alive():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("catenary")]

weights = weakref.ref(next(o for o in gc.get_objects() if type(o).__name__ == "CpuDevice"))
cycle = [llm]
cycle.append(cycle)
del llm, cycle
gc.collect()
condition = threading.Condition()
with condition:
    assert condition.wait_for(lambda: not alive() or condition.wait(0.05), 60)
while alive():
    pass
gc.collect()
print(weights())
assert len(ask(load()).token_ids) == 4
"""
    assert run(model, script) == ("None\n", "")


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "code", "error"),
    [
        ("raise ValueError('mine')", 1, "ValueError: mine"),
        ("sys.exit(3)", 3, ""),
        ("threading.Thread(target=sys.exit, args=(3,)).start()", 0, ""),
        ("llm.close(); llm.close()", 0, ""),
        ("import asyncio\nasync def main():\n    assert ask(llm)\nasyncio.run(main())", 0, ""),
        ("import os\nif os.fork():\n    assert os.wait()[1] == 0\nelse:\n    sys.exit()", 0, ""),
        ("llm.self = llm\nask(llm)", 0, ""),
    ],
    ids=["exception", "sys.exit", "thread", "closed", "asyncio", "fork", "cycle"],
)
def test_however_it_ends(model: Path, script: str, code: int, error: str) -> None:
    _, err = run(model, script, code)
    assert err.splitlines()[-1:] == ([error] if error else [])


@pytest.mark.long
def test_ctrl_c_in_a_call_ends_the_program(model: Path) -> None:
    script = """
print("ready", flush=True)
for _ in range(10_000):
    ask(llm, 400)
"""
    process = start(model, script)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=ENDS_S)
    finally:
        process.kill()
    assert process.returncode == -signal.SIGINT
    assert err.splitlines()[-1] == "KeyboardInterrupt"


@pytest.mark.long
def test_a_process_of_pytest_ends(model: Path, tmp_path: Path) -> None:
    test = tmp_path / "test_users.py"
    test.write_text(
        "from catenary import LLM\n"
        f"llm = LLM({str(model)!r}, dtype='float32', device_threads=1, kv_cache_gib=0.01, progress=False)\n"
        "def test_one():\n"
        "    assert llm.generate('ab')\n"
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        str(test),
    ]
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=ENDS_S,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert ended.returncode == 0, ended.stdout
