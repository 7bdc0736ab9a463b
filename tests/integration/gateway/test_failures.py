"""Parts that refuse, break, vanish and come back, as a client sees it."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

from catenary.v1 import common_pb2
from gateway.app import GatewayApp
from gateway.config import GatewayConfig
from gateway.errors import INTERNAL_MESSAGE
from tests.support.answers import joined
from tests.support.gateway import COMPLETIONS, MODEL, Stack, running_stack, saying, script, tokenizer_process
from tests.support.http import call
from tests.support.secrets import TestSecrets
from tests.support.stack_fixtures import StartStack
from tests.support.waiting import eventually

# For good: one that may be repeated waits in the router.
FULL = common_pb2.Error(code=common_pb2.ERROR_CODE_OVERLOADED, message="No.", retryable=False)
CODES = [
    (common_pb2.ERROR_CODE_OVERLOADED, 429, "rate_limit_exceeded"),
    (common_pb2.ERROR_CODE_INVALID_ARGUMENT, 400, "invalid_value"),
    (common_pb2.ERROR_CODE_UNAVAILABLE, 503, "engine_unavailable"),
    (common_pb2.ERROR_CODE_INTERNAL, 500, "internal_error"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("code", "status", "name"), CODES)
async def test_a_refusal_is_a_status(stack: Stack, code: Any, status: int, name: str, stream: bool) -> None:
    error = common_pb2.Error(code=code, message="No.", retryable=False, retry_after_ms=2500)
    stack.faults.refuse_next(error, times=10)
    answer = await stack.complete(stream=stream)
    assert (answer.status, answer.json()["error"]["code"]) == (status, name)
    assert answer.headers["content-type"] == "application/json"
    if status in (429, 503):
        assert answer.headers["retry-after"] == "3"
        assert answer.headers["retry-after-ms"] == "2500"
    stack.faults.refusals.clear()
    await stack.alive()


async def test_what_was_refused_has_no_latency(stack: Stack) -> None:
    stack.faults.refuse_next(FULL)
    assert (await stack.complete(n=3)).status == 429
    await stack.idle()
    page = (await stack.get("/metrics")).body.decode()
    assert 'catenary_request_failures_total{model_name="tiny",reason="rate_limit_exceeded"} 1.0' in page
    for name in ("request_success_total{", "e2e_request_latency_seconds_count{", "prompt_tokens_total{"):
        assert name not in page


async def test_a_defect_is_the_fixed_500(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_model: object) -> None:
        raise RuntimeError("at /some/path")

    monkeypatch.setattr("gateway.routes.server.describe", fail)
    answer = await stack.get("/v1/models")
    assert answer.status == 500
    assert answer.headers["content-type"] == "application/json"
    error = {"message": INTERNAL_MESSAGE, "type": "server_error", "param": None, "code": "internal_error"}
    assert answer.json() == {"error": error}
    monkeypatch.undo()
    await stack.alive()


async def test_one_refused_choice_refuses_the_request(stack: Stack) -> None:
    stack.faults.refuse_next(FULL)
    assert (await stack.complete(n=3)).status == 429
    await stack.alive()


async def test_an_engine_error_in_the_middle(start_stack: StartStack) -> None:
    # Each fails on another engine as well, that is twice: enough for a breaker.
    rule = saying("abc", then="error")
    stack = await start_stack(script(rule, step_delay_ms=20), router={"breaker_faults": 100})
    events = (await stack.complete(stream=True)).events
    assert events[-1] == "[DONE]"
    assert set(events[-2]) == {"error"}
    assert set(events[-2]["error"]) == {"message", "type", "param", "code"}
    assert "".join(event["choices"][0]["text"] for event in events[:-2]) == "abc"
    whole = await stack.complete()
    assert whole.status == 500
    await stack.idle()
    page = (await stack.get("/metrics")).body.decode()
    assert "failures_total" in page
    for prefix in ("catenary_", "vllm:"):
        assert f'{prefix}request_success_total{{finished_reason="error",model_name="tiny"}} 2.0' in page
    assert 'finished_reason="abort"' not in page


@pytest.mark.parametrize("stream", [False, True])
async def test_a_crashed_core_is_waited_for(start_stack: StartStack, stream: bool) -> None:
    stack = await start_stack(script(step_delay_ms=1))
    body = {"max_tokens": 300, "seed": 1, "stream": stream}
    expected = joined(await stack.complete(**body))
    steps = stack.engine.app.frontend.load().steps
    job = asyncio.create_task(stack.complete(**body))
    await eventually(lambda: stack.engine.app.frontend.load().steps > steps + 3, "some steps")
    stack.faults.crash()
    assert joined(await asyncio.wait_for(job, 10)) == expected
    await stack.alive()


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_stays_away_ends_requests(start_stack: StartStack, stream: bool) -> None:
    stack = await start_stack(script(step_delay_ms=5), failover_wait_s=0.5)
    job = asyncio.create_task(stack.complete(max_tokens=900, stream=stream))
    await eventually(lambda: stack.engine.app.frontend.load().steps > 3, "some steps")
    await stack.engine.stop()
    answer = await asyncio.wait_for(job, 10)
    if stream:
        assert answer.events[-2]["error"]["code"] == "engine_unavailable"
    else:
        assert (answer.status, answer.json()["error"]["code"]) == (503, "engine_unavailable")
        assert "retry-after" in answer.headers
    page = (await stack.get("/metrics")).body.decode()
    assert 'catenary_given_up_sequences_total{cause="unavailable"} 1.0' in page


async def test_without_an_engine_nothing_is_served(start_stack: StartStack) -> None:
    stack = await start_stack(failover_wait_s=0.2)
    await stack.engine.stop()
    await eventually(lambda: not stack.gateway.ready, "a gateway that is not ready")
    for path in ("/health", "/ready"):
        assert (await stack.get(path)).status == 503
    assert (await stack.get("/live")).status == 200
    answer = await stack.complete()
    assert (answer.status, answer.json()["error"]["code"]) == (503, "engine_unavailable")
    assert int(answer.headers["retry-after"]) >= 1
    assert (await stack.complete(model="nope")).status == 404
    assert (await stack.get("/v1/models")).json()["data"][0]["id"] == MODEL


@pytest.mark.parametrize("stream", [False, True])
async def test_a_router_that_stays_away_ends_requests(start_stack: StartStack, stream: bool) -> None:
    stack = await start_stack(script(step_delay_ms=5), failover_wait_s=0.5)
    job = asyncio.create_task(stack.complete(max_tokens=900, stream=stream))
    await eventually(lambda: stack.engine.app.frontend.load().steps > 3, "some steps")
    await stack.router.stop()
    answer = await asyncio.wait_for(job, 10)
    if stream:
        assert answer.events[-2]["error"]["code"] == "engine_unavailable"
    else:
        assert answer.status == 503
    assert (await stack.complete()).status == 503
    assert (await stack.get("/ready")).status == 503
    await eventually(lambda: stack.gateway.upstreams.session.live == 0, "no live sequence")


async def test_before_anything_is_there(run_dir: Path) -> None:
    secrets = TestSecrets.write(run_dir)
    gateway = GatewayApp(
        GatewayConfig(
            port=0,
            router=f"unix:{run_dir}/absent.sock",
            tokenizer=(f"unix:{run_dir}/absent2.sock",),
            client_secret_file=secrets.client_file,
        )
    )
    await gateway.start()
    try:
        assert (await call(gateway.address, "GET", "/live")).status == 200
        assert (await call(gateway.address, "GET", "/ready")).status == 503
        assert (await call(gateway.address, "GET", "/v1/models")).json() == {"object": "list", "data": []}
        answer = await call(gateway.address, "POST", COMPLETIONS, {"model": "m", "prompt": "x"})
        assert answer.status == 503
        assert "retry-after" in answer.headers
    finally:
        await gateway.stop(0)


async def test_a_wrong_secret_keeps_the_gateway_away(stack: Stack, run_dir: Path) -> None:
    wrong = run_dir / "wrong"
    wrong.write_text("something-else\n")
    config = stack.gateway.config.model_copy(update={"client_secret_file": wrong})
    gateway = GatewayApp(config)
    await gateway.start()
    try:
        answer = await call(gateway.address, "POST", COMPLETIONS, {"model": MODEL, "prompt": "x"})
        assert answer.status == 503
        assert not gateway.ready
    finally:
        await gateway.stop(0)


async def test_a_tokenizer_that_goes_away_is_503(run_dir: Path) -> None:
    own = run_dir / "tok"
    own.mkdir()
    with tokenizer_process(own) as (target, process):
        absent = f"unix:{run_dir}/absent.sock"
        async with running_stack(run_dir, target, extra_tokenizers=(absent,), failover_wait_s=0.5) as stack:
            for _ in range(4):
                assert (await stack.complete("text", max_tokens=1)).status == 200
            process.terminate()
            await eventually(lambda: process.poll() is not None, "the end of the tokenizer")
            answer = await stack.complete("text", max_tokens=1)
            assert (answer.status, answer.json()["error"]["code"]) == (503, "tokenizer_unavailable")
            assert int(answer.headers["retry-after"]) >= 1
            assert (await stack.complete([7, 8], max_tokens=1)).status == 200


async def test_a_frozen_tokenizer_is_passed_over(run_dir: Path, tokenizer_target: str) -> None:
    own = run_dir / "tok"
    own.mkdir()
    with tokenizer_process(own) as (target, process):
        options: dict[str, Any] = {"extra_tokenizers": (target,), "tokenizer_silence_s": 1.0}
        async with running_stack(run_dir, tokenizer_target, **options) as stack:
            pool = stack.gateway.upstreams.tokenizers
            await eventually(lambda: all(t.prompt for t in pool.targets.all), "two tokenizers", timeout_s=30)
            process.send_signal(signal.SIGSTOP)
            try:
                await eventually(lambda: sum(t.prompt for t in pool.targets.all) == 1, "one tokenizer")
                for _ in range(4):
                    assert (await stack.post(COMPLETIONS, {"prompt": "x"}, timeout_s=5)).status == 200
                await eventually(lambda: sum(t.answering for t in pool.targets.all) == 1, "one that is away")
                assert (await stack.get("/ready")).status == 200
            finally:
                process.send_signal(signal.SIGCONT)
            await eventually(lambda: all(t.prompt for t in pool.targets.all), "two tokenizers again")


async def test_draining_finishes_streams_and_refuses_new_requests(start_stack: StartStack) -> None:
    stack = await start_stack(script(step_delay_ms=5))
    job = asyncio.create_task(stack.complete(max_tokens=100, stream=True))
    await eventually(lambda: stack.engine.app.frontend.load().running == 1, "a running sequence")
    stopping = asyncio.create_task(stack.gateway.stop(10))
    await eventually(lambda: stack.gateway.requests.draining, "a draining gateway")
    assert (await stack.get("/ready")).json() == {"status": "draining"}
    assert (await stack.get("/ready")).status == 503
    assert (await stack.get("/live")).status == 200
    refused = await stack.complete()
    assert (refused.status, refused.json()["error"]["code"]) == (503, "engine_unavailable")
    answer = await job
    assert answer.events[-2]["choices"][0]["finish_reason"] == "length"
    await asyncio.wait_for(stopping, 10)
    with pytest.raises(OSError):
        await stack.get("/live")


async def test_a_drain_ends_what_takes_too_long(start_stack: StartStack) -> None:
    stack = await start_stack(script(step_delay_ms=20))
    job = asyncio.create_task(stack.complete(max_tokens=900, stream=True))
    await eventually(lambda: stack.engine.app.frontend.load().steps > 2, "some steps")
    await asyncio.wait_for(stack.gateway.stop(0.2), 10)
    answer = await job
    assert answer.events[-2]["error"]["code"] == "engine_unavailable"
    await stack.engine.idle()


async def test_too_many_requests_at_a_time(start_stack: StartStack) -> None:
    stack = await start_stack(script(step_delay_ms=20), max_requests=2)
    jobs = [asyncio.create_task(stack.complete(max_tokens=40)) for _ in range(2)]
    await eventually(lambda: len(stack.gateway.requests) == 2, "two requests at work")
    answer = await stack.complete()
    assert (answer.status, answer.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert "2 requests" in answer.json()["error"]["message"]
    assert (await stack.get("/health")).status == 200
    assert [(await job).status for job in jobs] == [200, 200]


async def test_an_engine_that_stalls_makes_health_bad(start_stack: StartStack) -> None:
    stack = await start_stack(script(), engine={"stall_limit_s": 0.3})
    stack.faults.stall()
    job = asyncio.create_task(stack.complete(max_tokens=5))
    await eventually(lambda: not stack.gateway.ready, "a gateway that is not ready")
    assert (await stack.get("/health")).status == 503
    stack.faults.resume()
    assert (await asyncio.wait_for(job, 10)).status == 200
    await eventually(lambda: stack.gateway.ready, "a ready gateway")
