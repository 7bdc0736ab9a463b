"""How the calls of a program reach the engine in its process, and how errors come back."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, TypeVar

from catenary.loop_thread import LoopThread
from catenary.parameters import Numbers, check_number
from catenary.v1 import common_pb2
from catenary_apps.llm.lifetime import Lifetime, in_use
from catenary_apps.llm.local_engine import EngineStartError
from catenary_apps.llm.progress import BatchProgress, StartProgress
from catenary_apps.llm.stack import LocalStack
from gateway import ApiError

T = TypeVar("T")

# Requests in the stack at a time, as a multiple of what runs at once: enough that no step lacks a sequence.
_AHEAD = 4
# A core that is told to end while it loads hears it at the next part of its start. Its thread is a daemon.
_GIVE_UP_S = 3.0
_AT_ONCE = Numbers(1, 2**31 - 1, whole=True)

_INSTEAD: dict[int, str] = {
    common_pb2.MODEL_TASK_GENERATE: "this model generates text: use generate, chat or beam_search (LLM(..., "
    'task="embed") has it give vectors)',
    common_pb2.MODEL_TASK_EMBED: "this model makes embeddings: use embed, score or encode",
    common_pb2.MODEL_TASK_SCORE: "this model scores pairs of texts: use score, classify or encode",
    common_pb2.MODEL_TASK_CLASSIFY: "this model classifies texts: use classify or encode",
}


class Calls:
    """A model in this process and the calls of it. Several threads may call it."""

    def __init__(
        self,
        model: str,
        options: Mapping[str, Any],
        chat_template: Path | None,
        *,
        progress: bool,
        loading: bool,
    ) -> None:
        """Load the model. Raises ValueError or RuntimeError, one line."""
        self._progress = progress
        with in_use(), StartProgress(model, shown=loading) as shown:
            # Here, where Ctrl-C is heard at once: to fetch or convert a model may take long.
            stack = LocalStack(model, options, chat_template, lambda line: shown.tell(line, None))
            loop = LoopThread("catenary-llm")
            self._lifetime = Lifetime(loop, stack)
            try:
                loop.run(stack.start(shown.tell))
            except BaseException as error:
                with suppress(Exception):
                    self._lifetime.close(_GIVE_UP_S)
                if isinstance(error, EngineStartError):
                    raise RuntimeError(str(error)) from None
                raise
        self._abandon = weakref.finalize(self, self._lifetime.abandon)
        # The end of the program does it in order, and waits.
        self._abandon.atexit = False

    def close(self) -> None:
        """End the engine and give its memory back. Idempotent."""
        self._abandon.detach()
        self._lifetime.close()

    @property
    def _stack(self) -> LocalStack:
        return self._lifetime.stack

    def _require(self, method: str, tasks: Collection[int]) -> None:
        """Raises ValueError if the model is for none of these tasks."""
        if self._stack.task not in tasks:
            raise ValueError(f"LLM.{method}: {_INSTEAD[self._stack.task]}")

    async def _many(
        self,
        requests: Sequence[Callable[[], Awaitable[T]]],
        use_tqdm: bool | None,
        at_once: int | None = None,
    ) -> list[T]:
        """The results of all, in order; some run at a time. The first error ends the others."""
        if at_once is not None:
            check_number("concurrency_limit", at_once, _AT_ONCE)
        if use_tqdm not in (None, True, False):
            raise TypeError(f"use_tqdm must be True, False or None, not {type(use_tqdm).__name__}")
        room = asyncio.Semaphore(at_once or _AHEAD * self._stack.max_running)
        shown = self._progress if use_tqdm is None else use_tqdm
        with BatchProgress(len(requests), shown=shown) as progress:

            async def one(request: Callable[[], Awaitable[T]]) -> T:
                async with room:
                    result = await request()
                progress.advance()
                return result

            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(request)) for request in requests]
        return [task.result() for task in tasks]

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        with ExitStack() as use:
            try:
                use.enter_context(in_use())
            except RuntimeError:
                # It does not begin.
                work.close()
                raise
            try:
                return self._lifetime.loop.run(work)
            except (ApiError, BaseExceptionGroup) as error:
                raise _plain(error) from None


def _plain(error: BaseException) -> BaseException:
    """What a caller of a function expects in place of an HTTP status; of several errors the first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if not isinstance(error, ApiError):
        return error
    return ValueError(error.message) if error.status < 500 else RuntimeError(error.message)
