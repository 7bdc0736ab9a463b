"""Real engines in processes of their own: KV crosses from one core to another, and either may be killed."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from services.engine.app import EngineApp
from services.engine.config import EngineConfig
from tests.support.engines import FAST
from tests.support.specs import sequence_spec
from tests.support.torch_engine import LocalCore, save_tiny_model, tiny_options
from tests.support.waiting import eventually

pytestmark = pytest.mark.long

START_S = 120.0
PROMPTS = [[3 + (at * 7 + number) % 120 for at in range(60 + number)] for number in range(8)]


@pytest.fixture
async def engines(start_fleet, tmp_path):
    """A fleet with a real prefill and a real decode engine, and what one engine alone says to the prompts."""
    model = save_tiny_model("llama", tmp_path / "model")
    alone = LocalCore(tiny_options(model))
    keys = [alone.submit(prompt, max_tokens=24) for prompt in PROMPTS]
    alone.run()
    wanted = [alone.outputs[key].token_ids for key in keys]
    alone.engine.close()
    fleet = await start_fleet(engines=0, router={"handover_min_tokens": 16, "lease_ms": 20_000})
    apps = {}
    for role in ("prefill", "decode"):
        options = {
            **FAST,
            **fleet.secrets.options,
            "router": (fleet.router_address,),
            "listen": (f"unix:{tmp_path}/{role}.sock",),
            "engine_name": role,
            "model": str(model),
            "served_model_name": "tiny",
            "role": role,
            "dtype": "float32",
            "block_size": 8,
            "kv_cache_gib": 0.02,
            "device_threads": 1,
            "kv_transfer_directory": str(tmp_path / "kv"),
        }
        apps[role] = EngineApp(EngineConfig(**options))
        await apps[role].start()
    await _serving(fleet)
    yield fleet, apps, wanted
    for app in apps.values():
        await app.stop(0.0)


async def _serving(fleet) -> None:
    await eventually(
        lambda: sum(engine.serving for engine in fleet.router.fleet) == 2, "both engines", timeout_s=START_S
    )


async def ask(fleet, number, salt=""):
    spec = sequence_spec(
        PROMPTS[number], model="tiny", temperature=0.0, max_tokens=24, ignore_eos=True, cache_salt=salt
    )
    return await fleet.answer(spec)


def core_pid(app) -> int:
    """The process of an engine's core."""
    return app.frontend.core.process.pid


async def test_prompts_move_and_either_engine_may_be_killed(engines):
    fleet, apps, wanted = engines
    answers = await asyncio.gather(*[ask(fleet, number) for number in range(8)])
    for number, (tokens, end) in enumerate(answers):
        assert tokens == wanted[number]
        assert end.usage.transferred_tokens + end.usage.cached_tokens == len(PROMPTS[number]) - 1
    decode, prefill = apps["decode"].frontend, apps["prefill"].frontend
    assert decode.graphs.prefill.tokens == 0
    assert (decode.transfers.arrived, dict(decode.transfers.faults)) == (8, {})
    await eventually(lambda: prefill.load().used_blocks == decode.load().used_blocks == 0, "no block in use")
    # Prompts that its core had not done are computed by the other.
    for role in ("prefill", "decode"):
        asked = [asyncio.create_task(ask(fleet, number, salt=role)) for number in range(8)]
        await eventually(lambda role=role: apps[role].frontend.live_sequences > 0, "work", timeout_s=START_S)
        os.kill(core_pid(apps[role]), signal.SIGKILL)
        for number, task in enumerate(asked):
            assert (await task)[0] == wanted[number]
        await _serving(fleet)
    await eventually(lambda: prefill.load().used_blocks == decode.load().used_blocks == 0, "no block in use")
