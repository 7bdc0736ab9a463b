"""The real processes on a simulated HPU: servicer and core, attached to a router."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from catenary.rpc import open_channel
from catenary.v1 import engine_pb2, engine_pb2_grpc
from tests.support.fake_router import FakeRouter
from tests.support.secrets import TestSecrets
from tests.support.specs import sequence_spec
from tests.support.torch_engine import LocalCore, save_tiny_model, tiny_options
from tests.support.waiting import eventually

PROMPT = [5, 9, 13, 21]
LIMITS: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 32}


def spawn(command: list[str], environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Starts a process whose output goes to a file."""
    with log.open("wb") as file:
        return subprocess.Popen(command, env=environment, stdout=file, stderr=file)


@pytest.mark.timeout(300)
async def test_an_engine_on_a_simulated_hpu_answers_a_router(
    fake_router: FakeRouter, secrets: TestSecrets, run_dir: Path
) -> None:
    model = save_tiny_model("llama", run_dir / "model")
    core = LocalCore(tiny_options(model, **LIMITS))
    key = core.submit(PROMPT, max_tokens=6)
    core.run()
    options = {name.replace("_", "-"): value for name, value in LIMITS.items()}
    options |= {"model": model, "device": "sim", "dtype": "float32", "kv-cache-gib": 0.01}
    options |= {"max-prefill-batch": 1, "cache-dir": run_dir / "cache", "router": fake_router.address}
    options |= {"listen": f"unix:{run_dir}/engine.sock", "served-model-name": "tiny", "drain-s": 5}
    command = [
        sys.executable,
        "-m",
        "services.engine",
        *(f"--{name}={value}" for name, value in options.items()),
    ]
    environment = {
        **os.environ,
        "CATENARY_SIM": f"lock_directory={run_dir}",
        # The mode of graphs, as vLLM's users choose it.
        "PT_HPU_LAZY_MODE": "1",
    }
    log = run_dir / "engine.log"
    process = spawn([*command, *secrets.flags], environment, log)
    try:
        await eventually(
            lambda: fake_router.attachments or process.poll() is not None, "a router", timeout_s=120
        )
        assert process.poll() is None, log.read_text()
        router = await fake_router.attached()
        assert router.hello.device == "sim"
        spec = sequence_spec(PROMPT, model="tiny", max_tokens=6, temperature=0.0, ignore_eos=True)
        await router.submit(1, spec)
        await router.end_of(1)
        assert router.tokens[1] == core.outputs[key].token_ids
        async with open_channel(f"unix:{run_dir}/engine.sock", secret=secrets.client) as channel:
            stub = engine_pb2_grpc.EngineServiceStub(channel)
            status = await stub.GetStatus(engine_pb2.GetStatusRequest())
        assert status.capacity.block_size == 128
        assert status.device_counters["replays"] > status.device_counters["captures"] > 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
