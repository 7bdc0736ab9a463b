"""32 concurrent streams through all services, 128 tokens each: token by token what transformers decodes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from openai import AsyncOpenAI

from catenary.client import AsyncClient
from catenary.v1 import common_pb2
from tests.support.e2e_stack import ProcessStack

if TYPE_CHECKING:
    from tests.support.reference import Reference

pytestmark = [pytest.mark.model, pytest.mark.timeout(400)]

MODEL = "SmolLM2-135M-Instruct"
STREAMS = 32
TOKENS = 128
SHORT = 24
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
    finish_reason: str


async def over_grpc(client: AsyncClient, question: str) -> Stream:
    prompt = await client.render_chat([{"role": "user", "content": question}], model=MODEL)
    tokens: list[int] = []
    end = common_pb2.SequenceEnd()
    async for delta in client.generate(
        prompt, model=MODEL, temperature=0, max_tokens=TOKENS, ignore_eos=True
    ):
        assert end.reason == common_pb2.FINISH_REASON_UNSPECIFIED, "nothing follows the end"
        tokens += delta.token_ids
        if delta.HasField("end"):
            end = delta.end
    assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (len(prompt), TOKENS)
    assert end.reason == common_pb2.FINISH_REASON_LENGTH
    return Stream(question, tokens, None, "length")


async def over_http(client: AsyncOpenAI, question: str, max_tokens: int = TOKENS, **extra: Any) -> Stream:
    """The bytes of the log probabilities, of control tokens none, are those of the text."""
    messages: Any = [{"role": "user", "content": question}]
    chunks = await client.chat.completions.create(
        model=MODEL,
        messages=messages,
        temperature=0,
        max_tokens=max_tokens,
        logprobs=True,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"return_token_ids": True, **extra},
    )
    text, spelled, tokens, reasons, completion_tokens = "", b"", list[int](), list[str](), 0
    async for chunk in chunks:
        completion_tokens = chunk.usage.completion_tokens if chunk.usage else completion_tokens
        for choice in chunk.choices:
            text += choice.delta.content or ""
            content = choice.logprobs.content if choice.logprobs else None
            spelled += b"".join(bytes(entry.bytes or ()) for entry in content or ())
            tokens += (choice.model_extra or {}).get("token_ids") or []
            reasons += [choice.finish_reason] if choice.finish_reason else []
    (reason,) = reasons
    assert completion_tokens == len(tokens)
    assert spelled.decode() == text
    return Stream(question, tokens, text, reason)


def near_ties(streams: Sequence[Stream], reference: Reference) -> int:
    """How many streams went the other way at a near-tie. Any other difference is an error."""
    found = reference.differences([(reference.chat(s.question), s.token_ids) for s in streams])
    for stream, difference in zip(streams, found, strict=True):
        assert difference is None or difference.near_tie, f"{stream.question} differs at {difference}"
        if stream.text is not None:
            assert stream.text == reference.text(stream.token_ids)
    return sum(difference is not None for difference in found)


def connect(stack: ProcessStack) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{stack.address}/v1", api_key="none", max_retries=0, timeout=300)


async def test_32_streams_equal_transformers(
    stack: ProcessStack, reference: Reference, say: Callable[[str], None]
) -> None:
    assert len(QUESTIONS) == STREAMS
    started = time.monotonic()
    async with stack.client() as plain, connect(stack) as http:
        streams = await asyncio.gather(
            *(
                over_grpc(plain, question) if number % 2 else over_http(http, question, ignore_eos=True)
                for number, question in enumerate(QUESTIONS)
            )
        )
    served_s = time.monotonic() - started
    await stack.idle()
    assert {(len(stream.token_ids), stream.finish_reason) for stream in streams} == {(TOKENS, "length")}
    ties = near_ties(streams, reference)
    compared_s = time.monotonic() - started - served_s
    rate = STREAMS * TOKENS / served_s
    say(
        f"{STREAMS} streams of {TOKENS} tokens: {served_s:.1f} s, {rate:.0f} tokens/s; compared in "
        f"{compared_s:.1f} s; near-ties that went the other way: {ties}"
    )
    assert ties <= MOST_NEAR_TIES


@pytest.mark.long
async def test_32_streams_that_end_by_themselves(stack: ProcessStack, reference: Reference) -> None:
    questions = [f"What is {number} plus 1? Answer with one number." for number in range(STREAMS)]
    async with connect(stack) as http:
        streams = await asyncio.gather(*(over_http(http, q, SHORT) for q in questions))
    assert near_ties(streams, reference) <= MOST_NEAR_TIES
    assert {stream.finish_reason for stream in streams} == {"stop", "length"}
    assert all(len(s.token_ids) == SHORT for s in streams if s.finish_reason == "length")
