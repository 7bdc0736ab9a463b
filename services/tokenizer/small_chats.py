"""Small chats are rendered by the service itself: the way to a worker and back takes longer than they do."""

from __future__ import annotations

import time
from collections.abc import Iterator

from catenary.telemetry import get_logger
from services.tokenizer.execution import TaskPool
from services.tokenizer.rendering import ChatOptions, ChatTurn, ModelFilesError, Renderer
from services.tokenizer.workers import Answer, ChatTask, Task, TokenLists, WorkerSetup, answer_of

MAX_MESSAGES = 16
SLOWEST_S = 0.002
"""Processor time that such a chat may take; else the model's chats all go to workers."""
_TRIES = 3

_log = get_logger(__name__)


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
    """What renders chats of up to so many bytes as a worker of this setup would; None if that may take long,
    or there is none to render."""
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
    """Of `size` bytes each: one word, characters that are rare, short words in as many messages as may be."""
    yield [ChatTurn("user", "x" * size)]
    yield [ChatTurn("user", "".join(chr(0x4E00 + 37 * index % 20_000) for index in range(size // 3)))]
    roles = ("user", "assistant")
    words = "a1 " * (size // 3 // MAX_MESSAGES)
    yield [ChatTurn(roles[index % 2], words) for index in range(MAX_MESSAGES)]


def _seconds(renderer: Renderer, turns: list[ChatTurn]) -> float:
    """Least processor time of some tries."""
    spent = []
    for _ in range(_TRIES):
        began = time.thread_time()
        answer_of(lambda: renderer.simple_chat(turns, ChatOptions()))
        spent.append(time.thread_time() - began)
    return min(spent)
