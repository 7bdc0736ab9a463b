"""Complaints about other servers (`field_issues.py` has them all) that no other test shows."""

from __future__ import annotations

import ast
import asyncio
import json
from pathlib import Path

import pytest

from catenary.v1 import engine_pb2
from services.router.fleet import BreakerState
from tests.compat.field_issues import ISSUES
from tests.support.engines import ScriptedEngine
from tests.support.gateway import MODEL, script, tokenizer_process
from tests.support.repository import ROOT
from tests.support.router_fakes import FakeEngine, FakeGateway, expected, running_router, spec, until
from tests.support.stack_fixtures import StartStack
from tests.support.token_stream import TokenStream
from tests.support.waiting import eventually

LONG = 300


@pytest.mark.parametrize("number", ISSUES)
def test_each_issue_has_tests_that_exist(number: str) -> None:
    what, tests = ISSUES[number]
    assert what
    assert tests
    for test in tests:
        file, name = test.split("::")
        tree = ast.parse((ROOT / file).read_text())
        names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert name in names, test


async def test_6_a_stream_that_waited_in_vain_is_told_so(start_stack: StartStack) -> None:
    stack = await start_stack(
        script(step_delay_ms=5, capacity={"max_running": 1, "max_waiting": 0}),
        router={"lane_wait_s": "0.3,0.3,0.3,0.3"},
        failover_wait_s=0.5,
    )
    body = {"model": MODEL, "prompt": "x", "max_tokens": LONG}
    running = TokenStream(stack.address, body)
    await running.begun()
    waited = TokenStream(stack.address, body)
    await waited.finish()
    assert not waited.broken
    assert waited.error is not None
    # As a status if nothing of the answer was sent, else as an event and the end of the stream.
    assert waited.status in (408, 429, 503) or waited.done
    await running.finish()
    assert (running.error, running.done) == (None, True)


async def test_14_bad_requests_never_close_an_engine_off(start_stack: StartStack) -> None:
    stack = await start_stack()
    ready = stack.engine.app.frontend.ready
    assert ready is not None
    context = ready.model.max_model_len
    for _ in range(4):
        answers = await asyncio.gather(
            stack.complete([1] * (context + 1)),
            stack.complete("x", max_tokens=context + 1),
            stack.complete("x", logit_bias={"99999999": 1}),
            stack.complete("x", temperature=-1),
        )
        assert {answer.status for answer in answers} == {400}
    (engine,) = stack.router.fleet
    assert engine.breaker.state is BreakerState.CLOSED
    await stack.alive()


async def test_15_one_engine_that_serves_is_enough(monkeypatch) -> None:
    starting = engine_pb2.ENGINE_STATE_STARTING
    async with (
        running_router(monkeypatch) as (router, address),
        FakeEngine(address, name="slow", state=starting, reports=False) as slow,
        FakeEngine(address, name="quick"),
        FakeGateway(address) as gateway,
    ):
        await slow.send(load=engine_pb2.LoadReport(sequence=1, state=starting))
        for handle in range(10):
            await gateway.submit(handle, spec([handle + 1]))
        await gateway.ended(*range(10))
        assert all(gateway.tokens[handle] == expected([handle + 1]) for handle in range(10))
        assert not slow.submitted
        # It may start for as long as it says so, and is not forgotten.
        await slow.send(load=engine_pb2.LoadReport(sequence=2, state=engine_pb2.ENGINE_STATE_SERVING))
        await until(lambda: gateway.serving() == 2)
        assert len(router.fleet) == 2


async def test_16_a_full_engine_is_given_sequences_again(start_stack: StartStack) -> None:
    stack = await start_stack()
    for _ in range(5):
        stack.faults.refuse_next(times=2)
        answer = await stack.complete("x", max_tokens=3)
        assert answer.status == 200
    await stack.alive()


async def test_17_probes_are_answered_beside_many_streams(start_stack: StartStack) -> None:
    stack = await start_stack(script(step_delay_ms=5))
    body = {"model": MODEL, "prompt": "x", "max_tokens": 60}
    streams = [TokenStream(stack.address, body) for _ in range(100)]
    answered = 0
    while not all(stream.ended for stream in streams):
        for path in ("/live", "/health", "/ready"):
            assert (await stack.get(path)).status == 200
        answered += 1
    assert answered > 3
    for stream in streams:
        await stream.finish()
        assert (stream.status, stream.error, stream.done) == (200, None, True)


async def test_29_a_gateway_that_was_restarted_knows_all_models(
    start_stack: StartStack, run_dir: Path, secrets
) -> None:
    directory = run_dir / "further"
    directory.mkdir()
    with tokenizer_process(directory, flags=("--served-model-name", "other")) as (target, _):
        stack = await start_stack(extra_tokenizers=(target,))
        other = ScriptedEngine(
            [f"unix:{run_dir}/router.sock"],
            secrets,
            script=script(),
            served_model_name="other",
            listen=("127.0.0.1:0",),
        )
        await other.start()
        try:
            await eventually(lambda: len(stack.router.fleet) == 2, "a second engine")
            await stack.restart_gateway()
            board = stack.gateway.upstreams.models
            await eventually(lambda: len(list(board.names)) == 2, "two models whose tokenizers are loaded")
            models = json.loads((await stack.get("/v1/models")).body)["data"]
            assert {model["id"] for model in models} == {MODEL, "other"}
        finally:
            await other.stop()
