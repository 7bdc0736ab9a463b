"""Users' bug reports, section B: usage accounting, framing of events, errors in streams."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.support.gateway import CHAT, COMPLETIONS, MODEL, Stack, saying, script
from tests.support.http import Answer, call
from tests.support.stack_fixtures import StartStack
from tests.support.tiny_tokenizer import SPECIAL_IDS, byte_ids

USER = [{"role": "user", "content": "hi"}]
WITH_USAGE = {"stream": True, "stream_options": {"include_usage": True}}
PROMPTS = pytest.mark.parametrize(
    ("path", "prompt"), [(CHAT, {"messages": USER}), (COMPLETIONS, {"prompt": "hi"})]
)


@PROMPTS
async def test_c08_c09_usage_comes_once_on_a_chunk_of_its_own(
    stack: Stack, path: str, prompt: dict[str, Any]
) -> None:
    events = (await stack.post(path, {**prompt, "max_tokens": 6, **WITH_USAGE})).events
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"] == []
    assert events[-2]["usage"]["completion_tokens"] == 6
    assert [event["usage"] for event in events[:-2]] == [None] * (len(events) - 2)
    assert events[-3]["choices"][0]["finish_reason"] == "length"
    plain = (await stack.post(path, {**prompt, "max_tokens": 6, "stream": True})).events
    assert all("usage" not in event for event in plain[:-1])


@PROMPTS
async def test_c10_tokens_without_text_count(
    start_stack: StartStack, path: str, prompt: dict[str, Any]
) -> None:
    tokens = [*byte_ids("a世"), SPECIAL_IDS[0], SPECIAL_IDS[1], *byte_ids("🌶")]
    stack = await start_stack(script(saying(tokens, then="hash"), step_delay_ms=5))
    whole = (await stack.post(path, {**prompt, "max_tokens": 10})).json()
    assert whole["usage"]["completion_tokens"] == 10
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = (
        await stack.post(path, {**prompt, "max_tokens": 10, "stream": True, "stream_options": options})
    ).events
    counts = [event["usage"]["completion_tokens"] for event in events[:-1]]
    assert counts == sorted(counts)
    assert counts[-1] == 10


async def test_c11_cached_tokens_and_n(stack: Stack) -> None:
    ids = {"prompt": [7] * 64, "max_tokens": 4}
    for fields in ({}, {}, {"n": 2}):
        whole = (await stack.complete(**ids, **fields)).json()["usage"]
        streamed = (await stack.complete(**ids, **fields, **WITH_USAGE)).events[-2]["usage"]
        for usage in (whole, streamed):
            assert usage["prompt_tokens"] == 64
            assert usage["completion_tokens"] == 4 * fields.get("n", 1)
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
            assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] <= 64


@PROMPTS
@pytest.mark.parametrize("fault", [{"temperature": -1}, {"max_tokens": 100_000}, {"long": True}])
async def test_c13_a_bad_request_is_never_a_stream(
    stack: Stack, path: str, prompt: dict[str, Any], fault: dict[str, Any]
) -> None:
    if fault.get("long"):
        text = "q" * 3000
        fault = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    answer = await stack.post(path, {**prompt, **fault, "stream": True})
    assert answer.status == 400
    assert answer.headers["content-type"] == "application/json"
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@PROMPTS
async def test_c14_an_error_in_the_middle(start_stack: StartStack, path: str, prompt: dict[str, Any]) -> None:
    stack = await start_stack(script(saying("abc", then="error"), step_delay_ms=10))
    events = (await stack.post(path, {**prompt, "stream": True})).events
    assert events[-1] == "[DONE]"
    assert "choices" not in events[-2]
    assert events[-2]["error"]["message"]
    page = (await stack.get("/metrics")).body.decode()
    assert 'catenary_request_failures_total{model_name="tiny",reason="internal_error"} 1.0' in page
    assert 'finished_reason="stop"' not in page
    with pytest.raises(openai.APIError):
        await read_all(stack, path, prompt)


async def read_all(stack: Stack, path: str, prompt: dict[str, Any]) -> None:
    async with openai.AsyncOpenAI(base_url=f"{stack.address}/v1", api_key="k", max_retries=0) as client:
        create: Any = client.chat.completions.create if path == CHAT else client.completions.create
        async for _ in await create(model=MODEL, stream=True, **prompt):
            pass


@PROMPTS
async def test_c15_the_same_fault_has_the_same_status(
    stack: Stack, path: str, prompt: dict[str, Any]
) -> None:
    answers = [
        await stack.post(path, {**prompt, "max_tokens": -1, "stream": stream}) for stream in (True, False)
    ]
    assert [answer.status for answer in answers] == [400, 400]
    assert [answer.json()["error"]["param"] for answer in answers] == ["max_tokens"] * 2
    assert answers[0].json() == answers[1].json()


async def test_c16_an_unknown_model_is_404(stack: Stack) -> None:
    def checked(answer: Answer) -> None:
        assert (answer.status, answer.json()["error"]["code"]) == (404, "model_not_found")

    for path, prompt in ((CHAT, {"messages": USER}), (COMPLETIONS, {"prompt": "x"})):
        checked(await stack.post(path, {"model": "nope", **prompt}))
    checked(await call(stack.address, "GET", "/v1/models/nope"))
    for path in ("/v1/embeddings", "/v1/responses"):
        checked(await stack.post(path, {"model": "nope", "input": "x"}))
