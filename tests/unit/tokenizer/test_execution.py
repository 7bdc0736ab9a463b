"""What the end of a task means to the caller."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from catenary.rpc import RpcError
from catenary.v1 import common_pb2
from services.tokenizer.config import TokenizerConfig
from services.tokenizer.execution import TaskRunner
from services.tokenizer.rendering import RefusalCode
from services.tokenizer.requests import SizedTask
from services.tokenizer.workers import (
    Broken,
    PoolFull,
    Refused,
    TaskCrashed,
    TaskTimeout,
    Text,
    TokenizeTask,
    TokenLists,
    WorkerPool,
)

TASK = SizedTask(TokenizeTask("secret text", True), 11)


class FakePool:
    def __init__(self, end: Any) -> None:
        self._end = end

    async def run(self, task: Any, *, size: int, tenant: str = "", timeout_s: float | None = None) -> Any:
        if isinstance(self._end, Exception):
            raise self._end
        return self._end


def runner(end: Any) -> TaskRunner:
    config = TokenizerConfig(model_dir=Path("/models/tiny"), task_timeout_s=2.5, queue_size=7)
    return TaskRunner(config, cast(WorkerPool, FakePool(end)))


async def test_answers() -> None:
    lists = TokenLists([[1], [2, 3]])
    assert await runner(lists).tokens("completion", TASK) == lists
    assert await runner(Text("x")).text("detokenize", TASK) == "x"


async def test_a_long_text_that_takes_too_long_is_the_requests_fault() -> None:
    long = SizedTask(TokenizeTask("x" * 65_537, True), 65_537, param="text")
    with pytest.raises(RpcError) as caught:
        await runner(TaskTimeout()).tokens("tokenize", long)
    error = caught.value.error
    assert (error.code, error.param) == (common_pb2.ERROR_CODE_INVALID_ARGUMENT, "text")
    assert "65537 bytes" in error.message
    assert "2.5 s (task-timeout-s)" in error.message


@pytest.mark.parametrize(
    ("end", "code", "text"),
    [
        (PoolFull(), common_pb2.ERROR_CODE_OVERLOADED, "at most 7 requests"),
        (TaskTimeout(), common_pb2.ERROR_CODE_TIMEOUT, "2.5 s"),
        (TaskCrashed(), common_pb2.ERROR_CODE_UNAVAILABLE, "died"),
        (Broken("KeyError"), common_pb2.ERROR_CODE_INTERNAL, "internal error"),
        (Text("not ids"), common_pb2.ERROR_CODE_INTERNAL, "internal error"),
        (Refused(RefusalCode.UNSUPPORTED, "No.", "messages"), common_pb2.ERROR_CODE_UNSUPPORTED, "No."),
    ],
)
async def test_failures(end: Any, code: int, text: str) -> None:
    with pytest.raises(RpcError) as caught:
        await runner(end).tokens("tokenize", TASK)
    error = caught.value.error
    assert error.code == code
    assert text in error.message
    assert "secret" not in error.message
    assert "KeyError" not in error.message
