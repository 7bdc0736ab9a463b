"""A tokenizer service without a server: its answers, called in place."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

from catenary.loop_thread import in_daemon_thread
from catenary.rpc import CallCount, RpcError
from catenary.v1 import tokenizer_pb2
from gateway import from_wire
from gateway.text.pool import TokenizerPool
from gateway.text.target import TokenizerTarget
from services.tokenizer.app import make_servicer, worker_setup
from services.tokenizer.config import TokenizerConfig
from services.tokenizer.rendering import read_model_files
from services.tokenizer.servicer import TokenizerServicer
from services.tokenizer.workers import Answer, Task, TaskTools

T = TypeVar("T")

# Nobody waits behind a task here, and texts come from the program itself.
_LONG_S = 3600.0
_LONGEST_TASK_S = 600.0


class LocalTokenizers(TokenizerPool):
    """The face that a gateway has of tokenizer services, over one model in this process."""

    def __init__(self, directory: Path, name: str, chat_template: Path | None) -> None:
        """Raises ModelFilesError (ValueError for options) if the model's files cannot be used."""
        super().__init__(
            [], _no_channel, render_timeout_s=_LONG_S, wait_s=0, silence_s=_LONG_S, max_message_mib=1
        )
        config = TokenizerConfig(
            model_dir=directory,
            served_model_name=name,
            chat_template=chat_template,
            task_timeout_s=_LONGEST_TASK_S,
        )
        files = read_model_files(directory, chat_template=chat_template)
        tools = TaskTools(worker_setup(config, files))
        calls = CallCount(config.max_calls)
        self._local = _Local(make_servicer(config, files, _Thread(tools), tools.ready, calls))

    @property
    def answering(self) -> bool:
        return True

    async def _anywhere(
        self, call: Callable[[TokenizerTarget], Awaitable[T]], model: str, *, waits: bool = True
    ) -> T:
        try:
            return await call(cast("TokenizerTarget", self._local))
        except RpcError as failure:
            raise from_wire(failure.error, model=model) from None


def _no_channel(address: str, _name: str) -> NoReturn:
    raise ValueError(f"nothing is dialled here, {address} neither")


class _Thread:
    """Does tasks in a thread, one at a time, so that the loop goes on."""

    def __init__(self, tools: TaskTools) -> None:
        self._tools = tools
        self._turn = asyncio.Lock()

    async def run(self, task: Task, *, size: int, tenant: str = "", timeout_s: float | None = None) -> Answer:
        """The task's answer, however long it takes."""
        async with self._turn:
            return await in_daemon_thread(partial(self._tools.answer, task), name="catenary-tokenizer")


class _Local:
    """What a pool calls of a target."""

    def __init__(self, servicer: TokenizerServicer) -> None:
        self.stub = _Stub(servicer)

    async def render(
        self, request: tokenizer_pb2.RenderRequest, timeout_s: float
    ) -> tokenizer_pb2.RenderResponse:
        response: tokenizer_pb2.RenderResponse = await self.stub.Render(request, timeout=timeout_s)
        return response

    async def unary(self, method: Callable[..., Awaitable[Any]], request: Any, timeout_s: float) -> Any:
        return await method(request, timeout=timeout_s)


class _Stub:
    """A servicer's methods, called as those of a stub are."""

    def __init__(self, servicer: TokenizerServicer) -> None:
        self._servicer = servicer

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._servicer, name)
        # A servicer's methods take gRPC's context and ask nothing of it.
        return lambda request, timeout: method(request, None)
