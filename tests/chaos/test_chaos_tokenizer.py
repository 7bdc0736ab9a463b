"""The tokenizer's workers die, the tokenizer dies: requests wait for another one, running streams go on."""

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


async def test_the_only_tokenizer_killed_under_load_costs_no_request(stack: ProcessStack) -> None:
    before = await text(stack)
    workers = stack.tokenizer.children
    stream = Asked(stack, 300)
    await stream.stream.begun()
    over = asyncio.Event()
    answered = 0

    async def customer() -> None:
        nonlocal answered
        while not over.is_set():
            # Status 200 and the same text, each time.
            assert await text(stack) == before
            answered += 1

    async def more(than: int) -> None:
        async def have() -> bool:
            return answered >= than

        await until(have, "answered chats", timeout_s=30)

    async with asyncio.TaskGroup() as customers:
        for _ in range(8):
            customers.create_task(customer())
        await more(8)
        stack.tokenizer.kill()
        # Token ids need no tokenizer.
        await serves_exactly(stack)

        async def gone() -> bool:
            return not any(map(running, workers))

        await until(gone, "the end of the dead tokenizer's workers")
        stack.tokenizer.start()
        await more(answered + 16)
        over.set()
    await stream.exact()
