"""Users' bug reports as they concern `/v1/responses`: C12 to C16 and C30."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.support.gateway import MAX_MODEL_LEN, MODEL, saying, script
from tests.support.responses import RESPONSES, events_of
from tests.support.stack_fixtures import StartStack


async def test_c12_usage_counts_input_and_output(start_stack: StartStack) -> None:
    stack = await start_stack(script(saying("0123456789")))
    whole = (await stack.post(RESPONSES, {"input": "hi"})).json()
    streamed = events_of(await stack.post(RESPONSES, {"input": "hi", "stream": True}))[-1]["response"]
    chat = (await stack.chat("hi")).json()["usage"]
    for made in (whole, streamed):
        usage = made["usage"]
        assert usage["input_tokens"] == chat["prompt_tokens"]
        assert usage["output_tokens"] == chat["completion_tokens"] == 11
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        assert usage["input_tokens_details"]["cached_tokens"] <= usage["input_tokens"]


BAD: list[tuple[dict[str, Any], int, str, str]] = [
    ({"input": "x" * (MAX_MODEL_LEN + 1)}, 400, "input", "context_length_exceeded"),
    ({"input": "x", "max_output_tokens": MAX_MODEL_LEN}, 400, "input", "context_length_exceeded"),
    ({"input": "x", "temperature": -1}, 400, "temperature", "invalid_value"),
    ({"input": "x", "max_output_tokens": -1}, 400, "max_output_tokens", "invalid_value"),
    ({"input": "x", "model": "nope"}, 404, "model", "model_not_found"),
    ({"input": "x", "stop": ["a"] * 5}, 400, "stop", "invalid_value"),
    ({"input": "x", "logit_bias": {"AI": 1}}, 400, "logit_bias", "invalid_value"),
    ({"input": "x", "tools": [{"type": "abacus"}]}, 400, "tools.0", "unsupported_parameter"),
    (
        {"input": "x", "previous_response_id": "resp_x"},
        400,
        "previous_response_id",
        "previous_response_not_found",
    ),
]


async def test_c13_c15_c16_a_fault_is_the_same_status_streamed_or_not(start_stack: StartStack) -> None:
    stack = await start_stack()
    for body, status, param, code in BAD:
        for more in ({}, {"stream": True}, {"background": True}):
            answer = await stack.post(RESPONSES, {**body, **more})
            error = answer.json()["error"]
            assert answer.headers["content-type"] == "application/json"
            assert (answer.status, error["param"].split(".")[: param.count(".") + 1], error["code"]) == (
                *(status, param.split("."), code),
            )
    await stack.alive()


async def test_c14_an_engine_that_fails_midway_ends_the_stream_as_failed(start_stack: StartStack) -> None:
    stack = await start_stack(script(saying("abc", then="error"), step_delay_ms=10))
    events = events_of(await stack.post(RESPONSES, {"input": "x", "stream": True}))
    assert "".join(event.get("delta", "") for event in events) == "abc"
    last = events[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"]["code"] == "server_error"
    async with openai.AsyncOpenAI(base_url=f"{stack.address}/v1", api_key="k", max_retries=0) as client:
        with pytest.raises(openai.InternalServerError):
            await client.responses.create(model=MODEL, input="x")


async def test_urls_that_are_not_there(start_stack: StartStack) -> None:
    stack = await start_stack()
    for path, status, code in (
        (f"{RESPONSES}/resp_x", 404, "response_not_found"),
        (f"{RESPONSES}/resp_x/input_items", 404, "response_not_found"),
        (f"{RESPONSES}/resp_x?stream=true", 404, "response_not_found"),
        (f"{RESPONSES}/resp_x?stream=false&stream=false", 400, "invalid_value"),
        (f"{RESPONSES}/resp_x?starting_after=3", 400, "invalid_value"),
        (f"{RESPONSES}/resp_x?x=3", 400, "unknown_parameter"),
        (f"{RESPONSES}/resp_x?include=reasoning.secrets", 400, "unsupported_parameter"),
        (f"{RESPONSES}/resp_x/input_items?limit=0", 400, "invalid_value"),
        (f"{RESPONSES}/resp_x/input_items?limit=101", 400, "invalid_value"),
        (f"{RESPONSES}/resp_x/input_items?order=up", 400, "invalid_value"),
        (f"{RESPONSES}/%00%ff", 404, "response_not_found"),
        (RESPONSES, 405, "method_not_allowed"),
        ("/v1/files/file-x", 404, "file_not_found"),
        ("/v1/files/file-x/content", 404, "file_not_found"),
        ("/v1/files?limit=0", 400, "invalid_value"),
        ("/v1/files?after=file-x", 400, "invalid_value"),
        ("/v1/batches?after=batch_x", 400, "invalid_value"),
        ("/v1/batches/batch_x", 404, "batch_not_found"),
    ):
        answer = await stack.get(path)
        assert (answer.status, answer.json()["error"]["code"]) == (status, code), path
    assert (await stack.post(f"{RESPONSES}/resp_x/cancel", {})).status == 404
    assert (await stack.post("/v1/batches/batch_x/cancel", {})).status == 404
