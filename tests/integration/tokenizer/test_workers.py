"""What a hostile request or a dying worker does to the others: nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from catenary.rpc import error_of
from catenary.v1 import common_pb2
from catenary.v1 import tokenizer_pb2 as pb
from services.tokenizer.app import SERVICE
from tests.support import tiny_tokenizer as tiny
from tests.support.tokenizer_service import (
    RunningTokenizer,
    chat_request,
    running_tokenizer,
)

LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
TRAP_TEMPLATE = "{% if messages[0].content == 'loop' %}" + LOOP + "{% endif %}" + tiny.CHATML_TEMPLATE
TRAP = chat_request(("user", "loop"))
FINE = chat_request(("user", "fine"))


async def until(condition: Callable[[], bool], timeout_s: float = 20) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 (what is waited for happens in other processes)
            await asyncio.sleep(0.01)


def trap_model(tmp_path: Path) -> Path:
    return tiny.write_tiny_model(tmp_path / "trap", chat_template=TRAP_TEMPLATE)


async def code_of(call: Any) -> int:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return error_of(caught.value).code


def is_busy(pid: int) -> Callable[[], bool]:
    """True once the process has computed for a while: the trap has it."""
    process = psutil.Process(pid)
    start = process.cpu_times().user
    return lambda: process.cpu_times().user > start + 0.05


async def test_a_task_over_its_time_fails_alone(tmp_path: Path) -> None:
    options: dict[str, Any] = {"model_dir": trap_model(tmp_path), "workers": 2, "task_timeout_s": 3}
    async with running_tokenizer(tmp_path, **options) as running:
        before = set(running.service.pool.pids)
        trapped = asyncio.create_task(code_of(running.stub.Render(TRAP)))
        answers = [await running.stub.Render(FINE) for _ in range(20)]
        assert all(answer == answers[0] for answer in answers)
        assert not trapped.done()
        assert await trapped == common_pb2.ERROR_CODE_TIMEOUT
        await until(lambda: len(before & set(running.service.pool.pids)) == 1)
        await until(lambda: len(running.service.pool.pids) == 2)
        assert await running.stub.Render(FINE) == answers[0]


async def test_long_tasks_of_one_tenant_hold_up_no_other(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "model_dir": trap_model(tmp_path),
        "workers": 2,
        "task_timeout_s": 2,
        "short_text_kib": 1,
    }
    padding = "x" * 2048
    trap = chat_request(("user", "loop"), ("user", padding), tenant="a")
    async with running_tokenizer(tmp_path, **options) as running:
        pool = running.service.pool
        trapped = [asyncio.ensure_future(running.stub.Render(trap)) for _ in range(4)]
        await until(lambda: pool.waiting == 3)
        fine = chat_request(("user", "fine"), tenant="b")
        answers = [await running.stub.Render(fine) for _ in range(20)]
        assert all(answer == answers[0] for answer in answers)
        assert not any(task.done() for task in trapped)
        # A long one of another tenant comes after the first of those, not after all.
        assert await running.stub.Render(chat_request(("user", padding), tenant="b"))
        assert sum(task.done() for task in trapped) <= 2
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await trapped[0]
        error = error_of(caught.value)
        assert (error.code, error.param) == (common_pb2.ERROR_CODE_INVALID_ARGUMENT, "messages")
        assert "2052 bytes" in error.message
        assert "2 s (task-timeout-s)" in error.message
        for task in trapped:
            task.cancel()


async def test_a_tenant_that_fills_the_queue_leaves_room_for_another(tmp_path: Path) -> None:
    options: dict[str, Any] = {"model_dir": trap_model(tmp_path), "queue_size": 2}
    async with running_tokenizer(tmp_path, **options) as running:
        pool = running.service.pool
        running_task = asyncio.ensure_future(running.stub.Render(TRAP))
        await until(is_busy(pool.pids[0]))
        mine = chat_request(("user", "fine"), tenant="a")
        waiting = [asyncio.ensure_future(running.stub.Render(mine))]
        await until(lambda: pool.waiting == 1)
        waiting.append(asyncio.ensure_future(running.stub.Render(mine)))
        await until(lambda: pool.waiting == 2)
        other = asyncio.ensure_future(running.stub.Render(chat_request(("user", "fine"), tenant="b")))
        assert await code_of(waiting[1]) == common_pb2.ERROR_CODE_OVERLOADED
        running_task.cancel()
        assert await other == await waiting[0]


async def test_a_killed_worker_fails_its_task_and_is_replaced(tmp_path: Path) -> None:
    async with running_tokenizer(tmp_path, model_dir=trap_model(tmp_path)) as running:
        (pid,) = running.service.pool.pids
        trapped = asyncio.create_task(code_of(running.stub.Render(TRAP)))
        await until(is_busy(pid))
        os.kill(pid, signal.SIGKILL)
        assert await trapped == common_pb2.ERROR_CODE_UNAVAILABLE
        assert await running.stub.Render(FINE)
        assert running.service.pool.pids != (pid,)


async def test_an_idle_worker_that_dies_is_replaced_unasked(tmp_path: Path) -> None:
    async with running_tokenizer(tmp_path) as running:
        (pid,) = running.service.pool.pids
        health = running.service.server.health
        os.kill(pid, signal.SIGKILL)
        await until(lambda: health.get(SERVICE) is False)
        await until(lambda: health.get(SERVICE) is True)
        assert pid not in running.service.pool.pids
        assert await running.stub.Render(FINE)


async def test_a_full_queue_refuses_and_a_cancel_frees_its_place(tmp_path: Path) -> None:
    async with running_tokenizer(tmp_path, model_dir=trap_model(tmp_path), queue_size=2) as running:
        pool = running.service.pool
        trapped = running.stub.Render(TRAP)
        await until(is_busy(pool.pids[0]))
        waiting = [running.stub.Render(FINE) for _ in range(2)]
        calls = [asyncio.ensure_future(call) for call in (trapped, *waiting)]
        await until(lambda: pool.waiting == 2)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running.stub.Render(FINE)
        error = error_of(caught.value)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error.code == common_pb2.ERROR_CODE_OVERLOADED
        assert error.retryable
        assert error.retry_after_ms == 1000
        assert "at most 2 requests" in error.message
        waiting[0].cancel()
        await until(lambda: pool.waiting == 1)
        third = asyncio.ensure_future(running.stub.Render(FINE))
        await until(lambda: pool.waiting == 2)
        trapped.cancel()
        # The trap would hold the worker for ten seconds; its caller is gone.
        async with asyncio.timeout(5):
            assert await third == await calls[2]
        assert pool.waiting == 0


async def test_waiting_too_long_is_refused(tmp_path: Path) -> None:
    options: dict[str, Any] = {"model_dir": trap_model(tmp_path), "queue_timeout_s": 0.2}
    async with running_tokenizer(tmp_path, **options) as running:
        trapped = running.stub.Render(TRAP)
        await until(is_busy(running.service.pool.pids[0]))
        assert await code_of(running.stub.Render(FINE)) == common_pb2.ERROR_CODE_OVERLOADED
        trapped.cancel()


@pytest.mark.advisory("CVE-2025-61620")
async def test_a_template_that_eats_memory_harms_nobody(tmp_path: Path) -> None:
    template = "{% if messages[0].content == 'eat' %}{{ 'x' * 10**10 }}{% endif %}" + tiny.CHATML_TEMPLATE
    model = tiny.write_tiny_model(tmp_path / "eater", chat_template=template)
    async with running_tokenizer(tmp_path, model_dir=model, worker_memory_mib=1024) as running:
        code = await code_of(running.stub.Render(chat_request(("user", "eat"))))
        assert code == common_pb2.ERROR_CODE_INVALID_ARGUMENT
        assert await running.stub.Render(FINE)


async def test_five_megabytes_are_refused_without_tokenizing(tmp_path: Path) -> None:
    async with running_tokenizer(tmp_path) as running:
        for text in ("x" * 5_000_000, "<|im_end|>" * 500_000):
            request = chat_request(("user", text), max_prompt_tokens=8192)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await running.stub.Render(request)
            error = error_of(caught.value)
            assert error.code == common_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED
            assert "at least" in error.message
            assert "8192" in error.message


ADVERSARIAL = ["a", "0", " ", "\uffff", "<", "<|im_end|>", "<|im_", "\n", "é", "!", "'s", "\u0301", "🙂"]


@pytest.mark.advisory("CVE-2025-52566")
async def test_adversarial_texts_take_linear_time(tmp_path: Path) -> None:
    async def seconds(running: RunningTokenizer, text: str) -> float:
        """CPU time of the worker: the machine may be busy with other things."""
        worker = psutil.Process(running.service.pool.pids[0])
        before = worker.cpu_times()
        await running.stub.Render(chat_request(("user", text)))
        after = worker.cpu_times()
        return (after.user + after.system) - (before.user + before.system)

    async with running_tokenizer(tmp_path, workers=1, task_timeout_s=30) as running:
        for unit in ADVERSARIAL:
            text = unit * (400_000 // len(unit.encode()))
            small, large = await seconds(running, text[: len(text) // 8]), await seconds(running, text)
            # Eight times the text: quadratic would be sixty-four times the time.
            assert large < max(24 * small, 1), f"{unit!r}: {small:.3f} s, {large:.3f} s"


async def test_many_short_messages(tmp_path: Path) -> None:
    async with running_tokenizer(tmp_path, max_messages=10_000) as running:
        started = time.perf_counter()
        answer = await running.stub.Render(chat_request(*[("user", "hi")] * 10_000))
        assert list(answer.prompts[0].token_ids).count(tiny.IM_END_ID) == 10_000
        assert time.perf_counter() - started < 5


@pytest.mark.advisory("CVE-2026-71486")
async def test_a_thousand_requests_do_not_make_a_worker_grow(tmp_path: Path) -> None:
    async with running_tokenizer(tmp_path) as running:
        worker = psutil.Process(running.service.pool.pids[0])

        async def send(first: int) -> int:
            for number in range(first, first + 500):
                await running.stub.Tokenize(pb.TokenizeRequest(text=f"{number} " * 200))
            return int(worker.memory_info().rss)

        warm = await send(0)
        assert await send(500) - warm < 4 * 1024 * 1024


async def test_drain_lets_running_tasks_end(tmp_path: Path) -> None:
    text = "a <|im_end|> b" * 80_000
    async with running_tokenizer(tmp_path) as running:
        (pid,) = running.service.pool.pids
        call = asyncio.ensure_future(running.stub.Render(chat_request(("user", text))))
        await until(is_busy(pid))
        drain = asyncio.create_task(running.service.drain())
        await until(lambda: running.service.server.health.get(SERVICE) is False)
        assert await code_of(running.stub.Render(FINE)) == common_pb2.ERROR_CODE_DRAINING
        assert len((await call).prompts) == 1
        await drain
    assert not psutil.pid_exists(pid)


@pytest.mark.advisory("CVE-2025-52566")
def test_workers_import_neither_grpc_nor_torch_nor_transformers() -> None:
    code = (
        "import sys, services.tokenizer.workers.__main__, services.tokenizer.rendering\n"
        "heavy = {'torch', 'transformers', 'grpc', 'numpy'} & set(sys.modules)\n"
        "sys.exit(', '.join(heavy) or 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
