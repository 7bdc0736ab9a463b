"""The tokenizer's workers die, the tokenizer dies: requests are told to retry, running streams go on."""

from __future__ import annotations

import asyncio
import os
import signal

import psutil

from tests.chaos.support import MODEL, SPIN, Asked, serves_exactly
from tests.support.e2e_stack import ProcessStack, until
from tests.support.http import Answer, call
from tests.support.service_process import running

CHAT = "/v1/chat/completions"


async def chat(stack: ProcessStack, content: str = "hello") -> Answer:
    messages = [{"role": "user", "content": content}]
    request = {"model": MODEL, "messages": messages, "max_tokens": 8, "seed": 7}
    return await call(stack.address, "POST", CHAT, request, timeout_s=30)


async def text(stack: ProcessStack, content: str = "hello") -> str:
    answer = await chat(stack, content)
    assert answer.status == 200, answer.body
    return str(answer.json()["choices"][0]["message"]["content"])


async def test_a_worker_killed_while_idle_is_replaced(stack: ProcessStack) -> None:
    before = await text(stack)
    (worker,) = stack.tokenizer.children
    stream = Asked(stack, 150)
    await stream.stream.begun()
    os.kill(worker, signal.SIGKILL)
    # The request waits for the new worker.
    assert await text(stack) == before
    assert worker not in stack.tokenizer.children
    await stream.exact()


async def test_a_worker_killed_at_work_costs_nobody_an_answer(stack: ProcessStack) -> None:
    before, spun = await text(stack), await text(stack, SPIN)
    (worker,) = stack.tokenizer.children
    spent = psutil.Process(worker).cpu_times().user
    spinning = asyncio.create_task(text(stack, SPIN))

    async def at_work() -> bool:
        return psutil.Process(worker).cpu_times().user > spent + 0.1

    await until(at_work, "a worker that computes")
    waiting = [asyncio.create_task(text(stack)) for _ in range(3)]
    os.kill(worker, signal.SIGKILL)
    # Rendering has no effects, so the gateway asks again; the rest waits for the new worker.
    assert await spinning == spun
    assert await asyncio.gather(*waiting) == [before] * 3


async def test_a_killed_tokenizer(stack: ProcessStack) -> None:
    before = await text(stack)
    workers = stack.tokenizer.children
    stream = Asked(stack, 300)
    await stream.stream.begun()

    stack.tokenizer.kill()
    refused = await chat(stack)
    assert refused.status == 503
    assert refused.json()["error"]["code"] == "tokenizer_unavailable"
    assert "retry-after" in refused.headers
    # Token ids need no tokenizer.
    await serves_exactly(stack)

    async def gone() -> bool:
        return not any(map(running, workers))

    await until(gone, "the end of the dead tokenizer's workers")
    stack.tokenizer.start()

    async def answers() -> bool:
        answer = await chat(stack)
        assert answer.status in (200, 503), answer.body
        return answer.status == 200

    await until(answers, "answered chats", timeout_s=15)
    assert await text(stack) == before
    await stream.exact()
