"""Users' bug reports, section F: clients that hang up, engines that die, keys and origins, through the API.

What the engine's own parts of these cases are is in `test_caching_and_preemption.py`.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.e2e_stack import LEASE_MS, ProcessStack, StackPlan, running_stack, until
from tests.support.gateway import CHAT, COMPLETIONS, MODEL, Stack, script
from tests.support.http import call
from tests.support.stack_fixtures import StartStack
from tests.support.tiny_tokenizer import write_tiny_model
from tests.support.waiting import eventually

LONG = 300
KEY = "sk-one"
# The reports ask for one second; tests run beside other work.
GONE_S = 3
# The lease, a report's interval and a loaded machine.
HEALTH_S = LEASE_MS / 1000 + 3
GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


def load_of(stack: Stack) -> tuple[int, int, int]:
    """Running, waiting and used blocks of the engine."""
    load = stack.engine.app.frontend.load()
    return load.running, load.waiting, load.used_blocks


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "running", "waiting"),
    [
        ({"prompt": "x"}, 1, 0),
        ({"prompt": "x", "n": 4}, 4, 0),
        ({"prompt": "x", "n": 6}, 4, 2),
        ({"prompt": [7] * 100}, 1, 0),
    ],
    ids=["one", "four", "some queued", "in prefill"],
)
async def test_c54_who_hangs_up_is_computed_for_no_longer(
    start_stack: StartStack, fields: dict[str, Any], running: int, waiting: int, stream: bool
) -> None:
    small = {"max_running": 4, "max_batched_tokens": 16}
    stack = await start_stack(script(step_delay_ms=10, capacity=small))
    connection = await stack.open_stream(COMPLETIONS, {**fields, "max_tokens": LONG, "stream": stream})
    await eventually(lambda: load_of(stack)[:2] == (running, waiting), "sequences in the engine")
    connection.close()
    await eventually(lambda: load_of(stack) == (0, 0, 0), "an engine that holds nothing", timeout_s=GONE_S)


async def gauges(stack: Stack) -> list[float]:
    lines = (await stack.get("/metrics")).body.decode().splitlines()
    return [float(line.rsplit(" ", 1)[1]) for name in GAUGES for line in lines if line.startswith(name + "{")]


@pytest.mark.advisory("CVE-2026-9540")
async def test_c57_gauges_come_back_after_all_streams_are_closed(start_stack: StartStack) -> None:
    stack = await start_stack(script(step_delay_ms=10, capacity={"max_running": 8}))
    idle = await gauges(stack)
    assert idle == [0.0] * len(GAUGES)
    connections = [
        await stack.open_stream(COMPLETIONS, {"prompt": [7] * 40, "max_tokens": LONG, "stream": True})
        for _ in range(20)
    ]
    live = stack.router.admission
    await eventually(lambda: (load_of(stack)[0], live.live_sequences) == (8, 20), "20 streams")

    async def busy() -> bool:
        return all(await gauges(stack))

    async def as_before() -> bool:
        return await gauges(stack) == idle

    await until(busy, "gauges of 20 streams")
    for connection in connections:
        connection.close()
    await until(as_before, "idle gauges", timeout_s=GONE_S)


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessStack]:
    """One scripted engine behind a router, a tokenizer and a gateway."""

    def plan(directory: Path) -> StackPlan:
        path = directory / "script.json"
        path.write_bytes(msgspec.json.encode(script(step_delay_ms=10)))
        model = write_tiny_model(directory / "model")
        return StackPlan(model, MODEL, engine_flags=("--script", str(path)))

    with running_stack(plan) as stack:
        yield stack


@pytest.fixture
async def whole(processes: ProcessStack) -> ProcessStack:
    """The stack, serving."""
    await processes.ready()
    return processes


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
async def test_c56_health_tells_of_an_engine_that_is_dead_or_stuck(
    whole: ProcessStack, number: signal.Signals
) -> None:
    engine = whole.engines[0]
    body = {"model": MODEL, "prompt": "x", "max_tokens": LONG}
    waiting = asyncio.create_task(call(whole.address, "POST", COMPLETIONS, body, timeout_s=30))

    async def placed() -> bool:
        fleet = await whole.fleet()
        return fleet is not None and fleet.live_sequences == 1

    await until(placed, "a request in the engine")
    if number is signal.SIGKILL:
        engine.kill()
    else:
        engine.send(number)

    async def health_is(status: int) -> bool:
        return await whole.health() == status

    await until(lambda: health_is(503), "/health 503", timeout_s=HEALTH_S)
    if number is signal.SIGKILL:
        engine.start()
    else:
        engine.send(signal.SIGCONT)
    await until(lambda: health_is(200), "/health 200", timeout_s=20)
    # The request has waited for the engine, and is gone on with.
    assert (await waiting).status == 200
    again = await call(whole.address, "POST", COMPLETIONS, {**body, "max_tokens": 2}, timeout_s=10)
    assert again.status == 200


async def test_c58_every_route_and_method_needs_the_key(start_stack: StartStack) -> None:
    stack = await start_stack(api_key=(KEY,))
    headers = {"Authorization": f"Bearer {KEY}"}
    document = (await call(stack.address, "GET", "/openapi.json", headers=headers)).json()
    paths = [path.replace("{model_id}", "x") for path in document["paths"]]
    assert len(paths) > 5
    for path in (*paths, "/openapi.json", "/docs", "/metrics", "/nope"):
        for method in ("GET", "POST", "PUT", "DELETE", "PATCH"):
            status = (await call(stack.address, method, path)).status
            if path in ("/", "/live", "/health", "/ready", "/ping"):
                assert status in (200, 405)
            else:
                assert status == 401, (method, path)


async def test_c59_a_preflight_allows_the_headers_that_clients_send(start_stack: StartStack) -> None:
    stack = await start_stack(api_key=(KEY,), cors_allow_origins=("https://good.test",))
    asks = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    answer = await call(stack.address, "OPTIONS", CHAT, headers={"Origin": "https://good.test", **asks})
    assert answer.status == 200
    allowed = {name.strip() for name in answer.headers["access-control-allow-headers"].lower().split(",")}
    assert {"authorization", "content-type"} <= allowed
    answer = await call(stack.address, "OPTIONS", CHAT, headers={"Origin": "https://evil.test", **asks})
    assert "access-control-allow-origin" not in answer.headers
