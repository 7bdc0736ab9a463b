"""Users' bug reports, section F, as seen at the gateway: cancels, health, metrics, keys, origins."""

from __future__ import annotations

import asyncio
import re
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.chaos.support import MODEL as CHAOS_MODEL
from tests.chaos.support import chaos_script, slow_prompt
from tests.support.e2e_stack import ProcessStack, StackPlan, until
from tests.support.gateway import CHAT, COMPLETIONS, Stack, script
from tests.support.http import call
from tests.support.stack_fixtures import StartStack
from tests.support.tiny_tokenizer import write_tiny_model
from tests.support.waiting import eventually

KEY = "sk-compat"
GIVEN_BACK_S = 1.0
STALL_S = 2.0


def used(stack: Stack) -> tuple[int, int, int]:
    """Running, waiting and KV blocks in use, in the engine."""
    load = stack.engine.app.hub.load()
    return load.running, load.waiting, load.used_blocks


async def gauges(stack: Stack) -> dict[str, float]:
    """The gauges of load on the metrics page."""
    page = (await stack.get("/metrics")).body.decode()
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    found = {name: re.findall(rf"^{name}\{{.*\}} (\S+)$", page, re.MULTILINE) for name in names}
    return {name: sum(map(float, values)) for name, values in found.items() if values}


CANCELLED: dict[str, dict[str, Any]] = {
    "non-stream": {"prompt": "x"},
    "stream": {"prompt": "x", "stream": True},
    "n=4": {"prompt": "x", "n": 4},
    "prefill": {"prompt": [7] * 6000, "stream": True},
}


@pytest.mark.parametrize("fields", CANCELLED.values(), ids=CANCELLED)
async def test_c54_a_client_that_hangs_up_frees_its_blocks(
    start_stack: StartStack, fields: dict[str, Any]
) -> None:
    slow = script(model={"max_model_len": 100_000}, step_delay_ms=10, capacity={"max_batched_tokens": 64})
    stack = await start_stack(slow)
    before = used(stack)
    connection = await stack.open_stream(COMPLETIONS, {"max_tokens": 5000, **fields})
    await eventually(lambda: used(stack)[0] > 0 and used(stack)[2] > before[2], "work in the engine")
    connection.close()
    await eventually(lambda: used(stack) == before, "blocks given back", timeout_s=GIVEN_BACK_S)


async def test_c54_a_queued_request_leaves_the_queue(start_stack: StartStack) -> None:
    slow = script(model={"max_model_len": 100_000}, step_delay_ms=10, capacity={"max_running": 1})
    stack = await start_stack(slow)
    first = await stack.open_stream(COMPLETIONS, {"prompt": "x", "max_tokens": 5000, "stream": True})
    await eventually(lambda: used(stack)[:2] == (1, 0), "a running sequence")
    second = await stack.open_stream(COMPLETIONS, {"prompt": "y", "max_tokens": 5000})
    await eventually(lambda: used(stack)[:2] == (1, 1), "a queued sequence")
    second.close()
    await eventually(lambda: used(stack)[:2] == (1, 0), "an empty queue", timeout_s=GIVEN_BACK_S)
    first.close()


async def test_c57_gauges_fall_back_after_all_requests_were_aborted(start_stack: StartStack) -> None:
    stack = await start_stack(script(model={"max_model_len": 100_000}, step_delay_ms=10))
    idle = await gauges(stack)
    assert len(idle) == 3
    fields = {"prompt": "x", "max_tokens": 5000, "stream": True}
    streams = [await stack.open_stream(COMPLETIONS, fields) for _ in range(20)]
    await eventually(lambda: sum(used(stack)[:2]) == 20, "20 live sequences")

    async def busy() -> bool:
        return (await gauges(stack))["vllm:num_requests_running"] > 0

    await until(busy, "a gauge that shows them")
    for stream in streams:
        stream.close()

    async def quiet() -> bool:
        return await gauges(stack) == idle

    await until(quiet, "gauges as before", timeout_s=2)


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD"])
async def test_c58_every_route_needs_the_key(start_stack: StartStack, method: str) -> None:
    stack = await start_stack(api_key=(KEY,))
    document = (await stack.get("/openapi.json", {"Authorization": f"Bearer {KEY}"})).json()
    for path in [*document["paths"], "/openapi.json", "/docs", "/metrics", "/v1/unknown", "/"]:
        answer = await call(stack.address, method, path.replace("{model_id}", "tiny"))
        expected = {200, 405} if path in ("/live", "/health", "/ready") else {401}
        assert answer.status in expected, (method, path)


async def test_c59_preflight_allows_the_headers_that_clients_send(start_stack: StartStack) -> None:
    stack = await start_stack(api_key=(KEY,), cors_allow_origins=("https://app.test",))
    asks = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    known = await call(stack.address, "OPTIONS", CHAT, headers={"Origin": "https://app.test", **asks})
    assert known.status == 200
    allowed = known.headers["access-control-allow-headers"].lower()
    assert {"authorization", "content-type"} <= {name.strip() for name in allowed.split(",")}
    unknown = await call(stack.address, "OPTIONS", CHAT, headers={"Origin": "https://other.test", **asks})
    assert "access-control-allow-origin" not in unknown.headers


@pytest.fixture(scope="module")
def one_engine() -> Iterator[ProcessStack]:
    """Processes: one scripted engine behind a router and a gateway."""
    directory = Path(tempfile.mkdtemp(prefix="cat-"))
    path = directory / "script.json"
    path.write_bytes(msgspec.json.encode(chaos_script()))
    stack = ProcessStack(
        directory,
        StackPlan(
            model_dir=write_tiny_model(directory / "model"),
            model=CHAOS_MODEL,
            engine_flags=("--scripted", str(path), "--stall-limit-s", str(STALL_S)),
        ),
    )
    stack.start()
    try:
        yield stack
    finally:
        stack.kill()
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
async def processes(one_engine: ProcessStack) -> AsyncIterator[ProcessStack]:
    """The stack, serving."""
    await one_engine.ready()
    yield one_engine
    for service in one_engine.services:
        service.send(signal.SIGCONT)


@pytest.mark.parametrize("harm", [signal.SIGKILL, signal.SIGSTOP])
async def test_c56_health_tells_of_a_dead_or_stuck_engine(processes: ProcessStack, harm: int) -> None:
    fields = {"model": CHAOS_MODEL, "prompt": slow_prompt(), "max_tokens": 3000}
    waiting = asyncio.create_task(call(processes.address, "POST", COMPLETIONS, fields, timeout_s=60))

    async def running() -> bool:
        fleet = await processes.fleet()
        return fleet is not None and any(engine.load.running for engine in fleet.engines)

    await until(running, "a running request")
    processes.engines[0].send(harm)

    async def unhealthy() -> bool:
        return await processes.health() == 503

    await until(unhealthy, "/health 503", timeout_s=15)
    answer = await waiting
    assert answer.status in (500, 502, 503)
    assert answer.json()["error"]["message"]
    if harm == signal.SIGKILL:
        processes.engines[0].kill()
        processes.engines[0].start()
    else:
        processes.engines[0].send(signal.SIGCONT)
    await processes.ready()
