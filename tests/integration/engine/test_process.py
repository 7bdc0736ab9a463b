"""The engine as a process: what it imports, how it starts and how it ends."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from catenary_testing.engine import Script, ScriptedFaults
from tests.support.engines import EngineProcess
from tests.support.specs import expected_tokens, sequence_spec
from tests.support.waiting import eventually

PROMPT = [11, 12, 13]
SLOW = Script(step_delay_ms=10)


@pytest.fixture
async def start_process(fake_router, secrets, run_dir):
    processes = []

    def start(script=None, flags=()):
        directory = run_dir / f"p{len(processes)}"
        directory.mkdir()
        process = EngineProcess([fake_router.address], secrets, directory, script=script, flags=flags)
        processes.append(process)
        process.start()
        return process

    yield start
    for process in processes:
        await process.stop()


def test_the_scripted_engine_imports_no_torch():
    code = (
        "import asyncio, sys\n"
        "import catenary_testing.engine.__main__\n"
        "from catenary_testing.engine import ScriptedEngineApp\n"
        "from services.engine.config import EngineConfig\n"
        "async def main():\n"
        "    app = ScriptedEngineApp(EngineConfig(insecure=True, router=('127.0.0.1:1',)))\n"
        "    await app.start()\n"
        "    await app.frontend.facts.wait()\n"
        "    await app.stop(0)\n"
        "asyncio.run(main())\n"
        "heavy = {'torch', 'transformers', 'numpy', 'safetensors', 'gguf'} & set(sys.modules)\n"
        "sys.exit(f'imported {sorted(heavy)}' if heavy else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


async def test_a_process_attaches_answers_and_ends_on_sigterm(fake_router, start_process):
    process = start_process(SLOW)
    router = await fake_router.attached()
    await router.submit(1, sequence_spec(PROMPT, max_tokens=30))
    await eventually(lambda: router.tokens.get(1), "a first token")
    process.signal(signal.SIGTERM)
    await router.end_of(1)
    assert router.tokens[1] == expected_tokens(PROMPT, 30)
    assert await process.wait() == 0
    log = process.log.read_text()
    assert "Traceback" not in log
    assert "secret-of" not in log


async def test_a_killed_process_comes_back_under_a_new_instance_id(fake_router, start_process):
    process = start_process()
    first = await fake_router.attached()
    process.signal(signal.SIGKILL)
    await eventually(lambda: first.closed, "the end of the stream")
    assert await process.wait() == -signal.SIGKILL
    process.start()
    second = await fake_router.attached(2)
    assert second.hello.instance_id != first.hello.instance_id


async def test_a_stopped_process_wakes_up_fenced(fake_router, start_process):
    fake_router.lease_ms = 400
    process = start_process(SLOW)
    router = await fake_router.attached()
    await router.submit(1, sequence_spec(PROMPT, max_tokens=4000))
    await eventually(lambda: router.tokens.get(1), "a first token")
    process.signal(signal.SIGSTOP)
    before = len(router.loads)
    with pytest.raises(AssertionError, match="not within"):
        await eventually(lambda: len(router.loads) > before + 2, "a report while stopped", timeout_s=0.6)
    process.signal(signal.SIGCONT)
    again = await fake_router.attached(2)
    assert router.closed
    await eventually(lambda: again.load.sequence > 2 and again.load.used_blocks == 0, "an idle engine")
    assert again.load.running == 0


async def test_a_scripted_exit_ends_the_whole_process(fake_router, start_process):
    process = start_process(Script(faults=ScriptedFaults(exit_after_tokens=3)))
    router = await fake_router.attached()
    await router.submit(1, sequence_spec(PROMPT, max_tokens=50))
    assert await process.wait() == 70
    await eventually(lambda: router.closed, "the end of the stream")
    assert 1 not in router.ends


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (["--insecure", "--script", "/nowhere.yaml"], 2, "/nowhere.yaml"),
        (["--insecure", "--model", "/nowhere"], 2, "--model: model directory /nowhere does not exist"),
        (["--insecure", "--model", "/nowhere", "--served-model-name", "x"], 2, "/nowhere does not exist"),
        (["--insecure", "--model", "/etc/hostname"], 2, "--model: model file /etc/hostname is not a .gguf"),
        (["--insecure", "--model", "smollm"], 2, "did you mean smollm2?"),
        (["--insecure", "--script", "default", "--stall-limit-s", "0"], 2, "--stall-limit-s"),
        (["--insecure", "--script", "default", "--block-size", "x"], 2, "--block-size"),
        (["--insecure", "--script", "default", "--router", "nowhere"], 2, "--router"),
        (["--insecure", "--max-num-batched-tokens", "16"], 2, "at least max_num_seqs (32)"),
        (["--insecure", "--tls-require-client-cert"], 2, "tls_require_client_cert needs"),
        (["--insecure", "--script", "default", "--no-such-flag"], 2, "--no-such-flag"),
        (["--script", "default"], 2, "no secret is set"),
    ],
)
def test_a_bad_start_is_refused_in_one_line(starts, flags, code, said):
    module = "catenary_testing.engine" if "--script" in flags else "services.engine"
    done = starts.run(module, "--log-level", "error", *flags)
    assert done.returncode == code
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
