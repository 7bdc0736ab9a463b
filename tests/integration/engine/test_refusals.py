"""Bad sequences over the wire: each is refused alone, and its neighbours do not notice."""

from __future__ import annotations

import asyncio
import math
import time

import pytest

from catenary.v1 import common_pb2
from catenary_testing.engine import Script
from tests.support.specs import expected_tokens, sequence_spec
from tests.support.waiting import eventually

PROMPT = [11, 12, 13]
INVALID = common_pb2.ERROR_CODE_INVALID_ARGUMENT
TOO_LONG = common_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED

BAD = {
    "empty": (sequence_spec([]), INVALID, "prompt"),
    "vocabulary": (sequence_spec([32000]), INVALID, "prompt"),
    "prompt_len": (sequence_spec(PROMPT, prompt_len=4), INVALID, "prompt_len"),
    "context": (sequence_spec([5] * 4096), TOO_LONG, "prompt"),
    "5 MB prompt": (sequence_spec([5] * 1_300_000), TOO_LONG, "prompt"),
    "max_tokens 0": (sequence_spec(PROMPT, max_tokens=0), INVALID, "max_tokens"),
    "max_tokens huge": (sequence_spec(PROMPT, max_tokens=2**32 - 1), TOO_LONG, "max_tokens"),
    "min_tokens": (sequence_spec(PROMPT, min_tokens=9), INVALID, "min_tokens"),
    "temperature NaN": (sequence_spec(PROMPT, temperature=math.nan), INVALID, "temperature"),
    "temperature -1": (sequence_spec(PROMPT, temperature=-1), INVALID, "temperature"),
    "top_p 0": (sequence_spec(PROMPT, top_p=0), INVALID, "top_p"),
    "top_p 1.1": (sequence_spec(PROMPT, top_p=1.1), INVALID, "top_p"),
    "top_k": (sequence_spec(PROMPT, top_k=-2), INVALID, "top_k"),
    "stop id": (sequence_spec(PROMPT, stop_token_ids=[32000]), INVALID, "stop_token_ids"),
    "stop ids": (sequence_spec(PROMPT, stop_token_ids=range(3, 103)), INVALID, "stop_token_ids"),
    "top_logprobs": (sequence_spec(PROMPT, top_logprobs=21), INVALID, "top_logprobs"),
    "model": (sequence_spec(PROMPT, model="gpt"), common_pb2.ERROR_CODE_MODEL_NOT_FOUND, "model"),
}


async def _neighbour(router, handle: int) -> float:
    """Watch a stream to its end; its longest gap in seconds."""
    seen, last, longest = 0, time.monotonic(), 0.0
    while handle not in router.ends:
        if len(router.tokens.get(handle, ())) != seen:
            now = time.monotonic()
            seen, longest, last = len(router.tokens[handle]), max(longest, now - last), now
        await asyncio.sleep(0.001)
    return longest


@pytest.mark.advisory("CVE-2026-93840", "CVE-2026-44223")
async def test_each_bad_sequence_is_refused_and_a_neighbour_goes_on(
    fake_router, start_engine, record_property
):
    engine = await start_engine(script=Script(step_delay_ms=2))
    router = await fake_router.attached()
    await router.submit(1000, sequence_spec(PROMPT, max_tokens=400))
    watching = asyncio.create_task(_neighbour(router, 1000))
    for handle, (spec, code, param) in enumerate(BAD.values()):
        await router.submit(handle, spec)
        error = await router.refusal_of(handle)
        assert (error.code, error.param, error.retryable) == (code, param, False)
    record_property("longest_gap_ms", round(await watching * 1000))
    assert router.tokens[1000] == expected_tokens(PROMPT, 400)
    assert set(router.tokens) == {1000}
    await engine.idle()


@pytest.mark.parametrize("name", ["vocabulary", "temperature NaN"])
async def test_a_refused_sequence_has_no_end_and_is_unknown(fake_router, start_engine, name):
    await start_engine()
    router = await fake_router.attached()
    await router.submit(1, BAD[name][0])
    await router.refusal_of(1)
    await router.abort(1)
    await eventually(lambda: router.aborts, "the answer")
    assert router.aborts == [(1, common_pb2.ABORT_OUTCOME_UNKNOWN)]
    assert not router.ends
