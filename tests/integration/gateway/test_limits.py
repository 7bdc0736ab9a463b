"""Limits of keys, classes and shed requests as a client sees them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from catenary.v1 import common_pb2
from gateway.auth import owner_name
from tests.support.gateway import COMPLETIONS, MODEL, script
from tests.support.http import Answer, call
from tests.support.minutes import stop_the_clock
from tests.support.stack_fixtures import StartStack
from tests.support.waiting import eventually

ALICE = {"Authorization": "Bearer sk-alice"}
BOB = {"Authorization": "Bearer sk-bob"}
KEYS = ("sk-alice", "sk-bob")


@pytest.fixture(autouse=True)
def _one_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    stop_the_clock(monkeypatch)


async def ask(stack, headers: dict[str, str], **fields) -> Answer:
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 4, **fields}
    return await call(stack.address, "POST", COMPLETIONS, body, headers)


async def test_a_key_has_its_minute_and_others_theirs(start_stack: StartStack) -> None:
    stack = await start_stack(api_key=KEYS, key_requests_per_minute=3, key_tokens_per_minute=1000)
    first = await ask(stack, ALICE)
    assert first.status == 200
    assert first.headers["x-ratelimit-limit-requests"] == "3"
    assert first.headers["x-ratelimit-remaining-requests"] == "2"
    assert first.headers["x-ratelimit-limit-tokens"] == "1000"
    assert int(first.headers["x-ratelimit-remaining-tokens"]) < 1000
    # Streams and requests that are wrong count too; what asks nothing of an engine does not.
    stream = await ask(stack, ALICE, stream=True)
    assert stream.headers["x-ratelimit-remaining-requests"] == "1"
    assert (await ask(stack, ALICE, max_tokens="x")).status == 400
    assert (await call(stack.address, "GET", "/v1/models", None, ALICE)).status == 200
    refused = await ask(stack, ALICE)
    assert refused.status == 429
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert int(refused.headers["retry-after"]) >= 1
    # A key that is none is told so, and costs nobody anything.
    assert (await ask(stack, {"Authorization": "Bearer sk-eve"})).status == 401
    assert (await ask(stack, BOB)).status == 200


async def test_keys_of_a_file_have_limits_of_their_own(start_stack: StartStack, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("sk-alice requests-per-minute=2\nsk-bob requests-per-minute=0\nsk-carol\n")
    stack = await start_stack(api_key_file=file, key_requests_per_minute=1)
    carol = {"Authorization": "Bearer sk-carol"}
    answers = {
        name: [await ask(stack, key) for _ in range(3)]
        for name, key in (("alice", ALICE), ("bob", BOB), ("carol", carol))
    }
    statuses = {name: [answer.status for answer in three] for name, three in answers.items()}
    assert statuses == {"alice": [200, 200, 429], "bob": [200] * 3, "carol": [200, 429, 429]}
    assert answers["alice"][0].headers["x-ratelimit-limit-requests"] == "2"
    assert "x-ratelimit-limit-requests" not in answers["bob"][0].headers


async def test_headers_that_make_no_sense_cost_nothing_of_the_minute(start_stack: StartStack) -> None:
    stack = await start_stack(api_key=KEYS, key_requests_per_minute=1)
    for header, value, status in (
        ("x-priority-class", "urgent", 400),
        ("x-priority-class", "system", 403),
        ("x-max-wait-ms", "soon", 400),
    ):
        assert (await ask(stack, {**ALICE, header: value})).status == status
    assert (await ask(stack, ALICE)).status == 200


async def test_tokens_and_requests_at_work(start_stack: StartStack) -> None:
    stack = await start_stack(
        script(step_delay_ms=20), api_key=KEYS, key_tokens_per_minute=200, key_concurrent=1
    )
    busy = asyncio.create_task(ask(stack, ALICE, max_tokens=60))
    await eventually(lambda: stack.gateway.upstreams.session.live == 1, "a sequence")
    second = await ask(stack, ALICE)
    assert (second.status, "key-concurrent" in second.json()["error"]["message"]) == (429, True)
    assert int(second.headers["x-ratelimit-remaining-tokens"]) < 200
    assert (await ask(stack, BOB, max_tokens=1)).status == 200
    assert (await busy).status == 200
    long = await ask(stack, ALICE, prompt="x" * 199)
    assert long.status == 429
    assert "key-tokens-per-minute" in long.json()["error"]["message"]
    assert (await ask(stack, ALICE, max_tokens=1)).status == 200


async def test_a_store_that_is_away_is_no_defect(start_stack: StartStack) -> None:
    options = {"api_key": KEYS, "key_requests_per_minute": 1, "limits_store": "redis://127.0.0.1:1/0"}
    stack = await start_stack(**options)
    assert (await ask(stack, ALICE)).status == 200
    assert (await ask(stack, ALICE)).status == 429


async def test_what_is_shed_costs_no_render(start_stack: StartStack, monkeypatch: pytest.MonkeyPatch) -> None:
    capacity = {"max_running": 1, "max_waiting": 0}
    options = {"lane_sequences": (1, 2, 2, 0), "tenant_share": 0.5, "retry_after_ms": 3000}
    stack = await start_stack(script(capacity=capacity, step_delay_ms=20), router=options, api_key=KEYS)
    jobs = [asyncio.create_task(ask(stack, ALICE, max_tokens=120))]
    await eventually(lambda: stack.router.admission.live_sequences == 1, "one at work")
    jobs.append(asyncio.create_task(ask(stack, ALICE, max_tokens=1)))
    rendered = 0
    tokenize = stack.gateway.upstreams.tokenizers.tokenize

    async def counted(*args):
        nonlocal rendered
        rendered += 1
        return await tokenize(*args)

    monkeypatch.setattr(stack.gateway.upstreams.tokenizers, "tokenize", counted)
    (session,) = stack.gateway.upstreams.session.targets.all
    await eventually(
        lambda: session.shed.refusal(MODEL, common_pb2.PRIORITY_CLASS_DEFAULT, owner_name(b"sk-alice")),
        "what is shed",
    )
    refused = await ask(stack, ALICE)
    assert refused.status == 429
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert int(refused.headers["retry-after"]) >= 1
    assert rendered == 0
    # Another tenant has its own share, and another class its own queue.
    jobs.append(asyncio.create_task(ask(stack, BOB, max_tokens=1)))
    jobs.append(asyncio.create_task(ask(stack, ALICE, max_tokens=1, service_tier="priority")))
    assert (await ask(stack, BOB, service_tier="flex")).status == 429
    waited = await ask(stack, {**BOB, "x-max-wait-ms": "0", "x-priority-class": "interactive"})
    assert (waited.status, waited.json()["error"]["code"]) == (408, "timeout")
    assert [answer.status for answer in await asyncio.gather(*jobs)] == [200] * 4


async def test_headers_of_admission(start_stack: StartStack) -> None:
    stack = await start_stack(api_key=KEYS, operator_key=("sk-operator",))
    operator = {"Authorization": "Bearer sk-operator", "x-priority-class": "system"}
    assert (await ask(stack, operator)).status == 200
    refused = await ask(stack, {**ALICE, "x-priority-class": "system"})
    assert (refused.status, refused.json()["error"]["param"]) == (403, "x-priority-class")
    refused = await ask(stack, {**ALICE, "x-max-wait-ms": "soon"})
    assert (refused.status, refused.json()["error"]["param"]) == (400, "x-max-wait-ms")
    assert (await ask(stack, {**ALICE, "x-session-id": "s" * 256, "x-max-wait-ms": "5000"})).status == 200
    lanes = stack.router.dispatcher.lifecycle.lanes()
    assert [lane.counts.admitted for lane in lanes] == [1, 0, 1, 0]
