"""32 concurrent streams through all services, 128 tokens each: token by token what transformers decodes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from openai import AsyncOpenAI

from catenary.client import CatenaryClient
from catenary.v1 import common_pb2
from tests.support.e2e_stack import ProcessStack

if TYPE_CHECKING:
    from tests.support.reference import Reference

pytestmark = [pytest.mark.model, pytest.mark.timeout(400)]

MODEL = "SmolLM2-135M-Instruct"
STREAMS = 32
TOKENS = 128
# Near-ties that float32 sums in another order may decide otherwise; more of them would be no accident.
MOST_NEAR_TIES = 3

SUBJECTS = ["rivers", "bread", "the moon", "chess", "bicycles", "whales", "glass", "a lighthouse"]
TASKS = [
    "Explain {} to a child.",
    "Write a short poem about {}.",
    "List five facts about {} and say for each why it matters, in one sentence.",
    "What is the history of {}?",
]
QUESTIONS = [task.format(subject) for task in TASKS for subject in SUBJECTS]


@dataclass(frozen=True)
class Stream:
    """What came of one question. `text` is None where only ids travelled."""

    question: str
    token_ids: list[int]
    text: str | None


async def over_grpc(client: CatenaryClient, question: str) -> Stream:
    prompt = await client.render_chat([{"role": "user", "content": question}], model=MODEL)
    tokens: list[int] = []
    end = common_pb2.SequenceEnd()
    answer = client.generate(prompt, model=MODEL, temperature=0, max_tokens=TOKENS, ignore_eos=True)
    async for delta in answer:
        assert not end.usage.completion_tokens, "nothing follows the end"
        tokens += delta.token_ids
        if delta.HasField("end"):
            end = delta.end
    assert end.reason == common_pb2.FINISH_REASON_LENGTH
    assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (len(prompt), TOKENS)
    return Stream(question, tokens, None)


async def over_http(client: AsyncOpenAI, question: str, reference: Reference) -> Stream:
    messages: Any = [{"role": "user", "content": question}]
    chunks = await client.chat.completions.create(
        model=MODEL,
        messages=messages,
        temperature=0,
        max_tokens=TOKENS,
        logprobs=True,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    text, tokens, reasons, completion_tokens = "", list[bytes](), list[str](), 0
    async for chunk in chunks:
        completion_tokens = chunk.usage.completion_tokens if chunk.usage else completion_tokens
        for choice in chunk.choices:
            text += choice.delta.content or ""
            entries = choice.logprobs.content if choice.logprobs else None
            tokens += [bytes(entry.bytes or ()) for entry in entries or ()]
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert (reasons, completion_tokens) == (["length"], TOKENS)
    return Stream(question, reference.ids(tokens), text)


async def test_32_streams_equal_transformers(
    stack: ProcessStack, reference: Reference, say: Callable[[str], None]
) -> None:
    assert len(QUESTIONS) == STREAMS
    started = time.monotonic()
    async with (
        stack.client() as plain,
        AsyncOpenAI(base_url=f"{stack.address}/v1", api_key="none", max_retries=0, timeout=300) as http,
    ):
        streams = await asyncio.gather(
            *(
                over_grpc(plain, question) if number % 2 else over_http(http, question, reference)
                for number, question in enumerate(QUESTIONS)
            )
        )
    served_s = time.monotonic() - started
    await stack.idle()

    differences = []
    for stream in streams:
        assert len(stream.token_ids) == TOKENS, stream.question
        if stream.text is not None:
            assert stream.text == reference.text(stream.token_ids)
        found = reference.difference(reference.chat(stream.question), stream.token_ids)
        if found is not None:
            assert found.near_tie, f"{stream.question} differs at {found}"
            differences.append(found)
    assert len(differences) <= MOST_NEAR_TIES, differences
    compared_s = time.monotonic() - started - served_s
    say(
        f"{STREAMS} streams of {TOKENS} tokens in {served_s:.1f} s, {STREAMS * TOKENS / served_s:.0f} tokens/s; "
        f"compared in {compared_s:.1f} s; near-ties that went the other way: {len(differences)}"
    )


async def test_32_streams_end_as_the_model_ends_them(stack: ProcessStack, reference: Reference) -> None:
    """Short questions, whose answers end by themselves at different times, all at once and all streamed."""
    questions = [f"What is {number} plus 1? Answer with one number." for number in range(STREAMS)]

    async def ask(client: AsyncOpenAI, question: str) -> tuple[str, str, int]:
        messages: Any = [{"role": "user", "content": question}]
        answer = await client.chat.completions.create(
            model=MODEL, messages=messages, temperature=0, max_tokens=40
        )
        choice = answer.choices[0]
        assert answer.usage is not None
        return choice.message.content or "", choice.finish_reason, answer.usage.completion_tokens

    async with AsyncOpenAI(base_url=f"{stack.address}/v1", api_key="none", timeout=300) as client:
        answers = await asyncio.gather(*(ask(client, question) for question in questions))
    stops = 0
    for question, (text, reason, completion_tokens) in list(zip(questions, answers, strict=True))[::4]:
        expected = reference.greedy(reference.chat(question), 40)
        ended = expected[-1] == reference.tokenizer.eos_token_id
        assert text == reference.text(expected)
        assert reason == ("stop" if ended else "length")
        assert completion_tokens == len(expected)
        stops += ended
    assert stops
