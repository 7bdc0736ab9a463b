"""Batches of prompts in one process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from catenary.llm.endpoint import OfflineEndpoint
from catenary.llm.local_engine import EngineStartError
from catenary.llm.outputs import EmbeddingOutput, EmbeddingRequestOutput, RequestOutput
from catenary.llm.progress import BatchProgress, StartProgress
from catenary.llm.results import request_output
from catenary.llm.sampling_params import SamplingParams
from catenary.llm.stack import LocalStack
from catenary.loop_thread import LoopThread
from gateway import ApiError
from gateway.generation import collect
from gateway.pooling import unpack
from gateway.routes.chat_completions import ChatEndpoint
from gateway.routes.embeddings import EmbeddingEndpoint

T = TypeVar("T")

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or vLLM's `{"prompt": text}` or `{"prompt_token_ids": ids}`."""

Message = Mapping[str, Any]

# Requests in the stack at a time, as a multiple of what runs at once: enough that no step lacks a sequence.
_AHEAD = 4


class LLM:
    """A model in this process, for batches: no server, no network.

    Close it, or use it as a context manager, to give the memory back. Several threads may call it. Ctrl-C
    ends what a call has begun.
    """

    def __init__(
        self,
        model: str = "smollm2",
        *,
        chat_template: Path | None = None,
        progress: bool = True,
        **options: Any,
    ) -> None:
        """Load a model.

        Args:
            model: as of `catenary up`: an alias, a directory, a GGUF file or a hub's id.
            chat_template: a file with a template in place of the model's own.
            progress: show bars while loading and generating, on a terminal.
            options: of the engine, by their names in docs/configuration.md (dtype, device, max_model_len,
                max_num_seqs, kv_cache_gib, ...).

        Raises:
            ValueError: an option or the model cannot work; one line that says why.
            RuntimeError: the engine did not start.
        """
        self._progress = progress
        self._loop = LoopThread("catenary-llm")
        try:
            self._stack = self._run(self._open(model, options, chat_template))
        except BaseException:
            self._loop.close()
            raise

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        on_output: Callable[[RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Go on with texts; one output for each prompt, in order.

        Args:
            prompts: one or several.
            sampling_params: for all, or one for each; None: the model's own defaults and 16 tokens.
            use_tqdm: show a bar; None: as the LLM was told.
            on_output: is told each output as it ends, on another thread; who interrupts the call has these.

        Raises:
            ValueError: a prompt or parameter cannot be honoured; nothing is generated then, or no more.
            RuntimeError: the engine failed.
        """
        listed = _listed(prompts)
        bodies = [_prompt_body(prompt) for prompt in listed]
        texts = [body["prompt"] if isinstance(body["prompt"], str) else None for body in bodies]
        return self._generate(bodies, texts, _each(sampling_params, len(bodies)), use_tqdm, on_output)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        **chat: Any,
    ) -> list[RequestOutput]:
        """Go on with chats, rendered by the model's template; as `generate` otherwise.

        Args:
            messages: one chat, or several, as in the API.
            sampling_params: as of `generate`.
            use_tqdm: as of `generate`.
            chat: what else the template sees, by the API's names: tools, documents, chat_template_kwargs,
                add_generation_prompt, continue_final_message.
        """
        if not messages:
            return []
        chats: Sequence[Any] = [messages] if isinstance(messages[0], Mapping) else messages
        rendered = self._run(self._render([list(one) for one in chats], chat))
        bodies = [{"prompt": ids} for ids in rendered]
        return self._generate(bodies, [None] * len(bodies), _each(sampling_params, len(bodies)), use_tqdm)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Vectors of texts, in order, of a model that makes such. Raises as `generate` does."""
        bodies = []
        for prompt in _listed(prompts):
            body: dict[str, Any] = {"input": _prompt_body(prompt)["prompt"], "dimensions": dimensions}
            bodies.append(body | {"truncate_prompt_tokens": truncate_prompt_tokens})
        return self._run(self._many([partial(self._embed, body) for body in bodies], use_tqdm))

    def close(self) -> None:
        """End the engine and give its memory back. Idempotent."""
        if self._loop.closed:
            return
        self._loop.run(self._stack.stop())
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _generate(
        self,
        bodies: Sequence[dict[str, Any]],
        texts: Sequence[str | None],
        params: Sequence[SamplingParams | None],
        use_tqdm: bool | None,
        on_output: Callable[[RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        async def one(body: dict[str, Any], text: str | None) -> RequestOutput:
            output = await self._complete(body, text)
            if on_output is not None:
                on_output(output)
            return output

        requests = [
            partial(one, {"max_tokens": 16} | body if param is None else body | param.body(), text)
            for body, text, param in zip(bodies, texts, params, strict=True)
        ]
        return self._run(self._many(requests, use_tqdm))

    async def _open(self, model: str, options: Mapping[str, Any], chat_template: Path | None) -> LocalStack:
        stack = await asyncio.to_thread(LocalStack, model, options, chat_template)
        with StartProgress(shown=self._progress) as progress:
            try:
                await stack.start(progress.tell)
            except EngineStartError as error:
                raise RuntimeError(str(error)) from None
        return stack

    async def _render(self, chats: Sequence[list[Message]], chat: Mapping[str, Any]) -> list[list[int]]:
        service, endpoint = self._stack.generations, ChatEndpoint()
        prompts = []
        for messages in chats:
            body = {"model": self._stack.name, "messages": messages, **chat}
            plan, _ = await service.prepare(endpoint, endpoint.parse(body, service.limits), cache_salt="")
            prompts.append(list(plan.prompts[0]))
        return prompts

    async def _complete(self, body: dict[str, Any], prompt: str | None) -> RequestOutput:
        service, endpoint = self._stack.generations, OfflineEndpoint()
        asked = {"model": self._stack.name, "return_token_ids": True, **body}
        fields = endpoint.parse(asked, service.limits)
        async with service.run(endpoint, fields, cache_salt="", deadline=service.deadline()) as running:
            await running.begin()
            return request_output(running.generation, await collect(running.generation), prompt)

    async def _embed(self, body: dict[str, Any]) -> EmbeddingRequestOutput:
        stack, endpoint = self._stack, EmbeddingEndpoint()
        fields = endpoint.parse({"model": stack.name, **body}, stack.generations.limits)
        pooled = await stack.poolings.run(endpoint, fields, deadline=stack.generations.deadline())
        vector = EmbeddingOutput(list(unpack(pooled.vectors[0])))
        return EmbeddingRequestOutput(pooled.request_id, list(pooled.documents[0].token_ids), vector)

    async def _many(self, requests: Sequence[Callable[[], Awaitable[T]]], use_tqdm: bool | None) -> list[T]:
        """The results of all, in order; some run at a time. The first error ends the others."""
        room = asyncio.Semaphore(_AHEAD * self._stack.max_running)
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
        try:
            return self._loop.run(work)
        except (ApiError, BaseExceptionGroup) as error:
            raise _plain(error) from None


def _plain(error: BaseException) -> BaseException:
    """What a caller of a function expects in place of an HTTP status; of several errors the first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if not isinstance(error, ApiError):
        return error
    return ValueError(error.message) if error.status < 500 else RuntimeError(error.message)


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    items: Iterable[Any] = prompts
    listed = list(items)
    if listed and all(isinstance(item, int) for item in listed):
        return [listed]
    return listed


def _prompt_body(prompt: Prompt) -> dict[str, Any]:
    if isinstance(prompt, Mapping):
        if "prompt_token_ids" in prompt:
            return {"prompt": list(prompt["prompt_token_ids"])}
        if isinstance(prompt.get("prompt"), str):
            return {"prompt": prompt["prompt"]}
        raise ValueError("a prompt that is an object has either prompt, a text, or prompt_token_ids")
    return {"prompt": prompt if isinstance(prompt, str) else list(prompt)}


def _each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise ValueError(f"there are {count} prompts and {len(params)} sampling_params")
    return list(params)
