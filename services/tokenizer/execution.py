"""Running a task on the pool: what its end means to the caller, and its metrics."""

from __future__ import annotations

import time
from typing import Protocol

from catenary.rpc import RpcError, refuse
from catenary.telemetry import get_logger
from catenary.v1 import common_pb2
from services.tokenizer import metrics
from services.tokenizer.config import TokenizerConfig
from services.tokenizer.rendering import RefusalCode
from services.tokenizer.requests import SizedTask
from services.tokenizer.workers import (
    Answer,
    Broken,
    PoolFull,
    Refused,
    Task,
    TaskCrashed,
    TaskTimeout,
    Text,
    TokenLists,
)

ERROR_CODES = {
    RefusalCode.INVALID_ARGUMENT: common_pb2.ERROR_CODE_INVALID_ARGUMENT,
    RefusalCode.UNSUPPORTED: common_pb2.ERROR_CODE_UNSUPPORTED,
    RefusalCode.CONTEXT_LENGTH_EXCEEDED: common_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED,
}

_log = get_logger(__name__)


class TaskPool(Protocol):
    """Does tasks. `WorkerPool` is one."""

    async def run(self, task: Task, *, size: int, tenant: str = "", timeout_s: float | None = None) -> Answer:
        """The answer to `task`, whose texts have `size` bytes, within this time or the pool's own.

        Raises PoolFull, TaskTimeout or TaskCrashed.
        """


class TaskRunner:
    """Runs tasks; every failure is an RpcError with a fixed text."""

    def __init__(self, config: TokenizerConfig, pool: TaskPool) -> None:
        self._config = config
        self._pool = pool

    async def tokens(self, kind: str, sized: SizedTask) -> TokenLists:
        """The answer to a task that gives token ids."""
        answer = await self._run(kind, sized)
        if not isinstance(answer, TokenLists):
            raise _internal()
        metrics.TOKENS.labels(kind).inc(sum(map(len, answer.prompts)))
        return answer

    async def text(self, kind: str, sized: SizedTask) -> str:
        """Text of a task that gives one."""
        answer = await self._run(kind, sized)
        if not isinstance(answer, Text):
            raise _internal()
        return answer.text

    async def attempt(self, kind: str, sized: SizedTask) -> Answer:
        """The worker's answer, Refused too, and counted. Raises RpcError if there was no room or the task met
        a defect, and TaskTimeout or TaskCrashed."""
        started = time.monotonic()
        outcome = "cancelled"
        try:
            answer = await self._pool.run(
                sized.task, size=sized.size, tenant=sized.tenant, timeout_s=sized.timeout_s
            )
            outcome = {Refused: "refused", Broken: "broken"}.get(type(answer), "ok")
        except PoolFull:
            outcome = "overloaded"
            raise self.overloaded() from None
        except TaskTimeout:
            outcome = "timeout"
            _log.warning("a task ran over its time", kind=kind)
            raise
        except TaskCrashed:
            outcome = "crashed"
            _log.error("a worker died with a task", kind=kind)
            raise
        finally:
            metrics.TASKS.labels(kind, outcome).inc()
            metrics.SECONDS.labels(kind).observe(time.monotonic() - started)
        if isinstance(answer, Broken):
            _log.error("a task met a defect", kind=kind, exception=answer.kind)
            raise _internal()
        return answer

    async def _run(self, kind: str, sized: SizedTask) -> Answer:
        try:
            answer = await self.attempt(kind, sized)
        except TaskTimeout:
            raise self._timed_out(sized) from None
        except TaskCrashed:
            raise self._crashed() from None
        if isinstance(answer, Refused):
            raise refuse(ERROR_CODES[answer.code], answer.message, param=answer.param)
        return answer

    def overloaded(self) -> RpcError:
        """The refusal of a task that there is no room for."""
        limits = self._config
        return refuse(
            common_pb2.ERROR_CODE_OVERLOADED,
            f"The tokenizer is overloaded: at most {limits.queue_size} requests with {limits.queue_mib} MiB "
            f"of text wait (queue-size, queue-mib), for {limits.queue_timeout_s:g} s (queue-timeout-s).",
            retryable=True,
            retry_after_ms=limits.retry_after_ms,
        )

    def _crashed(self) -> RpcError:
        # A replacement is on its way, and tasks have no effects: to ask again is safe and mostly enough.
        return refuse(
            common_pb2.ERROR_CODE_UNAVAILABLE,
            "The worker that rendered the prompt died.",
            retryable=True,
            retry_after_ms=self._config.retry_after_ms,
        )

    def _timed_out(self, sized: SizedTask) -> RpcError:
        limit = f"the limit of {self._config.task_timeout_s:g} s (task-timeout-s)"
        if sized.size > self._config.short_text_kib << 10:
            return refuse(
                common_pb2.ERROR_CODE_INVALID_ARGUMENT,
                f"The text of {sized.size} bytes could not be tokenized within {limit}. Please shorten it.",
                param=sized.param,
            )
        return refuse(common_pb2.ERROR_CODE_TIMEOUT, f"The prompt was not rendered within {limit}.")


def _internal() -> RpcError:
    return refuse(common_pb2.ERROR_CODE_INTERNAL, "The tokenizer failed because of an internal error.")
