"""The real model's engine is lost in the middle of requests: they go on, in float32 with the same tokens."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import pytest

from catenary.v1 import engine_pb2
from tests.support.e2e_stack import ProcessStack, until
from tests.support.http import call

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

MODEL = "SmolLM2-135M-Instruct"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TOKENS = 120
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 40}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
REQUESTS: tuple[tuple[str, dict[str, Any]], ...] = (
    (COMPLETIONS, {"prompt": "Once upon a time", "temperature": 0, "logprobs": 2}),
    (
        COMPLETIONS,
        {
            "prompt": "A list of animals:",
            "temperature": 0,
            "frequency_penalty": 0.5,
            "presence_penalty": 0.4,
            "repetition_penalty": 1.1,
            "min_tokens": TOKENS,
        },
    ),
    (COMPLETIONS, {"prompt": "The weather today is", "temperature": 0.8, "top_p": 0.9, "seed": 4, "n": 2}),
    (
        CHAT,
        {
            "messages": [{"role": "user", "content": "Invent a person."}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
            "temperature": 1.0,
            "seed": 11,
            "logprobs": True,
        },
    ),
)


async def ask_all(stack: ProcessStack) -> list[Any]:
    answers = [
        call(stack.address, "POST", path, {"model": MODEL, "max_tokens": TOKENS, **body}, timeout_s=120)
        for path, body in REQUESTS
    ]
    return [answer.json() for answer in await asyncio.gather(*answers)]


async def resumed(stack: ProcessStack) -> float:
    page = (await call(stack.address, "GET", "/metrics")).body.decode()
    found = [line for line in page.splitlines() if line.startswith("catenary_resumed_sequences_total{")]
    return sum(float(line.rpartition(" ")[2]) for line in found)


def numbers_of(value: Any) -> tuple[Any, list[float]]:
    """An answer without its log probabilities, and these."""
    found: list[float] = []

    def without(part: Any) -> Any:
        if isinstance(part, dict):
            return {key: without(item) for key, item in part.items() if key not in ("id", "created")}
        if isinstance(part, list):
            return [without(item) for item in part]
        if isinstance(part, float):
            found.append(part)
            return 0.0
        return part

    return without(value), found


@pytest.mark.long
async def test_an_engine_that_is_fenced_in_the_middle(stack: ProcessStack) -> None:
    expected, before_resumed = await ask_all(stack), await resumed(stack)
    asked = asyncio.create_task(ask_all(stack))
    engine = stack.engines[0]

    async def loads() -> list[engine_pb2.LoadReport]:
        fleet = await stack.fleet()
        assert fleet is not None
        return [one.load for one in fleet.engines if one.engine_name == engine.name]

    async def generated() -> int:
        return sum(load.generated_tokens for load in await loads())

    before = await generated()

    async def some() -> bool:
        return await generated() > before + 40

    await until(some, "some tokens of each request")
    engine.send(signal.SIGSTOP)
    try:

        async def lost() -> bool:
            return not await loads()

        await until(lost, "the engine to be lost")
    finally:
        engine.send(signal.SIGCONT)
    answers = await asked
    for answer, wanted in zip(answers, expected, strict=True):
        text, numbers = numbers_of(answer)
        wanted_text, wanted_numbers = numbers_of(wanted)
        assert text == wanted_text
        assert numbers == pytest.approx(wanted_numbers, abs=1e-4)
    assert await resumed(stack) == before_resumed + 5
