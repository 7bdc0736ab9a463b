"""Run tasks: on the pool of workers, or here, with metrics whose labels are closed sets.

Small chats are rendered by the service itself: the way to a worker and back takes longer than they do. Checks
of constraints have one verdict for each constraint, which is remembered, whatever it does to the worker.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from prometheus_client import Counter, Gauge, Histogram

from catenary.constraints import ConstraintKind
from catenary.rpc import RpcError, refuse
from catenary.sequence_limits import MAX_CONSTRAINT_AFTER
from catenary.telemetry import get_logger
from catenary.v1 import common_pb2, tokenizer_pb2
from services.tokenizer.config import TokenizerConfig
from services.tokenizer.rendering import ChatOptions, ChatTurn, ModelFilesError, RefusalCode, Renderer
from services.tokenizer.requests import SizedTask, checked_tenant
from services.tokenizer.workers import (
    Answer,
    Broken,
    ChatTask,
    ConstraintTask,
    PoolFull,
    Refused,
    Task,
    TaskCrashed,
    TaskTimeout,
    Text,
    TokenLists,
    WorkerSetup,
    answer_of,
)

TASKS = Counter(
    "catenary_tokenizer_tasks",
    "Tasks that ended, by kind and outcome (ok, refused, overloaded, timeout, crashed, broken, cancelled).",
    ["kind", "outcome"],
)
SECONDS = Histogram(
    "catenary_tokenizer_task_seconds",
    "Time from a task's arrival to its end, waiting included, in seconds.",
    ["kind"],
    buckets=(0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 30),
)
TOKENS = Counter("catenary_tokenizer_tokens", "Token ids given out, by kind of task.", ["kind"])
WAITING = Gauge("catenary_tokenizer_waiting_tasks", "Tasks that wait for a worker.")
WORKERS = Gauge("catenary_tokenizer_workers", "Worker processes that live.")


ERROR_CODES = {
    RefusalCode.INVALID_ARGUMENT: common_pb2.ERROR_CODE_INVALID_ARGUMENT,
    RefusalCode.UNSUPPORTED: common_pb2.ERROR_CODE_UNSUPPORTED,
    RefusalCode.CONTEXT_LENGTH_EXCEEDED: common_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED,
}

_log = get_logger(__name__)


class TaskPool(Protocol):
    """Does tasks. `WorkerPool` is one."""

    async def run(self, task: Task, *, size: int, tenant: str = "", timeout_s: float | None = None) -> Answer:
        """Return the answer to `task`, whose texts have `size` bytes, within this time or the pool's own.

        Raises PoolFull, TaskTimeout or TaskCrashed.
        """


class TaskRunner:
    """Runs tasks; every failure is an RpcError with a fixed text."""

    def __init__(self, config: TokenizerConfig, pool: TaskPool) -> None:
        self._config = config
        self._pool = pool

    async def tokens(self, kind: str, sized: SizedTask) -> TokenLists:
        """Return the answer to a task that gives token ids."""
        answer = await self._run(kind, sized)
        if not isinstance(answer, TokenLists):
            raise _internal()
        TOKENS.labels(kind).inc(sum(map(len, answer.prompts)))
        return answer

    async def text(self, kind: str, sized: SizedTask) -> str:
        """Return the text of a task that gives one."""
        answer = await self._run(kind, sized)
        if not isinstance(answer, Text):
            raise _internal()
        return answer.text

    async def attempt(self, kind: str, sized: SizedTask) -> Answer:
        """Return the worker's answer, Refused too, and count it. Raises RpcError if there was no room or the
        task met a defect, and TaskTimeout or TaskCrashed."""
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
            TASKS.labels(kind, outcome).inc()
            SECONDS.labels(kind).observe(time.monotonic() - started)
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
        """Return the refusal of a task for which there is no room."""
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


MAX_MESSAGES = 16
SLOWEST_S = 0.002
"""Processor time that such a chat may take; else the model's chats all go to workers."""
_TRIES = 3


class SmallChats:
    """A TaskPool: `pool` does whatever is not small, or might take long for all that (see `is_simple`).

    Nothing but texts in their roles counts as small: no tools, calls, documents, variables or templates.
    """

    def __init__(self, pool: TaskPool, renderer: Renderer, max_bytes: int) -> None:
        self._pool = pool
        self._renderer = renderer
        self._max_bytes = max_bytes

    async def run(self, task: Task, *, size: int, tenant: str = "", timeout_s: float | None = None) -> Answer:
        """See TaskPool."""
        if size <= self._max_bytes and isinstance(task, ChatTask) and _is_small(task):
            answer = answer_of(lambda: self._render(task))
            if answer is not None:
                return answer
        return await self._pool.run(task, size=size, tenant=tenant, timeout_s=timeout_s)

    def _render(self, task: ChatTask) -> TokenLists | None:
        chat = self._renderer.simple_chat(task.turns, task.options, task.limits)
        return None if chat is None else TokenLists([chat.ids], [chat.tail])


def renderer_of_small_chats(setup: WorkerSetup, max_bytes: int) -> Renderer | None:
    """Return a renderer of chats of up to so many bytes, equal to a worker's with this setup. None if such a
    chat may take long, or the model has no chat template."""
    try:
        renderer = Renderer(
            setup.files,
            max_rendered_chars=setup.max_rendered_chars,
            max_answer_tokens=setup.max_answer_tokens,
            json_limits=setup.json_limits,
        )
    except ModelFilesError:
        # The workers tell what is wrong.
        return None
    if not renderer.is_simple:
        return None
    slowest = max(_seconds(renderer, turns) for turns in _hard_chats(max_bytes))
    if slowest > SLOWEST_S:
        _log.info("chats are rendered by workers, small ones too", small_chat_ms=round(1e3 * slowest, 3))
        return None
    return renderer


def _is_small(task: ChatTask) -> bool:
    options = task.options
    asks = options.tools or options.documents or options.variables or options.chat_template is not None
    if asks or options.continue_final_message or len(task.turns) > MAX_MESSAGES:
        return False
    return not any(turn.tool_calls for turn in task.turns)


def _hard_chats(size: int) -> Iterator[list[ChatTurn]]:
    """Yield chats of `size` bytes: one word, rare characters, short words in as many messages as possible."""
    yield [ChatTurn("user", "x" * size)]
    yield [ChatTurn("user", "".join(chr(0x4E00 + 37 * index % 20_000) for index in range(size // 3)))]
    roles = ("user", "assistant")
    words = "a1 " * (size // 3 // MAX_MESSAGES)
    yield [ChatTurn(roles[index % 2], words) for index in range(MAX_MESSAGES)]


def _seconds(renderer: Renderer, turns: list[ChatTurn]) -> float:
    """Return the least processor time of several tries."""
    spent = []
    for _ in range(_TRIES):
        began = time.thread_time()
        answer_of(lambda: renderer.simple_chat(turns, ChatOptions()))
        spent.append(time.thread_time() - began)
    return min(spent)


_DEFAULT_PARAM = "constraint"
_KINDS = frozenset(int(kind) for kind in ConstraintKind)
# A constraint that killed its worker may have been unlucky.
_SUSPECT_S = 60.0


@dataclass(frozen=True, slots=True)
class _Verdict:
    """None: it can be honoured. `expires`: by the monotonic clock."""

    refusal: tuple[common_pb2.ErrorCode.ValueType, str] | None
    expires: float = float("inf")


class ConstraintVerdicts:
    """Has constraints compiled by the workers, for which they are long tasks."""

    def __init__(
        self, config: TokenizerConfig, runner: TaskRunner, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._runner = runner
        self._clock = clock
        self._known: OrderedDict[bytes, _Verdict] = OrderedDict()

    async def check(self, request: tokenizer_pb2.CheckConstraintRequest) -> None:
        """Raise RpcError: INVALID_ARGUMENT or UNSUPPORTED, with the request's `param`, if the constraint
        cannot be honoured; OVERLOADED if there was no place for it in time."""
        constraint, param = request.constraint, request.param or _DEFAULT_PARAM
        self._check_shape(constraint, param)
        key = _key(constraint)
        verdict = self._known.get(key)
        if verdict is None or verdict.expires < self._clock():
            verdict = await self._judge(constraint, param, checked_tenant(request.tenant))
            self._known[key] = verdict
            if len(self._known) > self._config.constraint_cache:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        if verdict.refusal is not None:
            code, message = verdict.refusal
            raise refuse(code, message, param=param)

    def _check_shape(self, constraint: common_pb2.Constraint, param: str) -> None:
        if constraint.kind not in _KINDS:
            raise _invalid("The kind of the constraint is not known.", param)
        size, limit = len(constraint.source.encode()), self._config.max_constraint_bytes
        if size > limit:
            raise _invalid(f"The constraint has {size} bytes; at most {limit} are allowed.", param)
        if constraint.HasField("after") and not 1 <= len(constraint.after) <= MAX_CONSTRAINT_AFTER:
            raise _invalid(
                f"The text that a constraint stands behind has 1 to {MAX_CONSTRAINT_AFTER} characters.", param
            )

    async def _judge(self, constraint: common_pb2.Constraint, param: str, tenant: str) -> _Verdict:
        """Check a constraint. After a crash try once more: a worker may die of another cause."""
        task = ConstraintTask(constraint.kind, constraint.source, param, constraint.closed_objects)
        sized = SizedTask(task, len(constraint.source), tenant, self._config.constraint_timeout_s, param)
        try:
            for _ in range(2):
                try:
                    answer = await self._runner.attempt("constraint", sized)
                except TaskCrashed:
                    continue
                if isinstance(answer, Refused):
                    return _Verdict((ERROR_CODES[answer.code], answer.message))
                return _Verdict(None)
            return self._suspect("The constraint is too complex to compile.")
        except TaskTimeout:
            limit = self._config.constraint_timeout_s
            return self._suspect(f"The constraint could not be compiled within the limit of {limit:g} s.")

    def _suspect(self, message: str) -> _Verdict:
        return _Verdict((common_pb2.ERROR_CODE_INVALID_ARGUMENT, message), self._clock() + _SUSPECT_S)


def _key(constraint: common_pb2.Constraint) -> bytes:
    form = f"{constraint.kind}:{constraint.closed_objects}:{constraint.source}"
    return hashlib.sha256(form.encode()).digest()


def _invalid(message: str, param: str) -> RpcError:
    return refuse(common_pb2.ERROR_CODE_INVALID_ARGUMENT, message, param=param)
