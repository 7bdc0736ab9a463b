"""Batches of prompts in one process."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from catenary.llm.calls import Prompt, listed, prompt_body
from catenary.llm.endpoint import OfflineEndpoint
from catenary.llm.outputs import BeamSearchOutput, RequestOutput
from catenary.llm.pooled import PooledCalls
from catenary.llm.results import beam_output, request_output
from catenary.llm.sampling_params import BeamSearchParams, SamplingParams
from catenary.v1 import common_pb2
from gateway.generation import collect
from gateway.routes.chat_completions import ChatEndpoint

Message = Mapping[str, Any]
Chat = str | Sequence[Message]
"""Messages as in the API, or one text, which a user says."""

_GENERATE = (common_pb2.MODEL_TASK_GENERATE,)


class LLM(PooledCalls):
    """A model in this process, for batches: no server, no network.

    The engine ends, and its memory is given back, when this is closed, left as a context manager, or garbage,
    and when the program ends. Several threads may call it. Ctrl-C ends what a call has begun.
    """

    def __init__(
        self,
        model: str = "smollm2",
        *,
        chat_template: str | Path | None = None,
        progress: bool = True,
        use_tqdm_on_load: bool = True,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        """Load a model.

        Args:
            model: as of `catenary up`: an alias, a directory, a GGUF file or a hub's id.
            chat_template: a file with a template in place of the model's own.
            progress: show on stderr what is done while loading and generating: bars on a terminal, else
                lines.
            use_tqdm_on_load: the same while loading.
            seed: draws the seeds of prompts that are given none, so that a program's second run repeats its
                first.
            options: of the engine, by their names in docs/configuration.md (dtype, device, max_model_len,
                max_num_seqs, kv_cache_gib, ...); and those of vLLM's LLM, with the meaning that
                docs/migration.md gives the same options of `vllm serve`.

        Raises:
            TypeError: an option is not known; the message names one that is near.
            ValueError: an option or the model cannot work; one line that says why.
            RuntimeError: the engine did not start.
        """
        template = None if chat_template is None else Path(chat_template)
        loading = progress and use_tqdm_on_load
        super().__init__(model, options, template, progress=progress, loading=loading)
        self._seeds = None if seed is None else random.Random(seed)
        self._tokenizer: Any = None

    def get_tokenizer(self) -> Any:
        """The model's tokenizer as transformers has it: `encode`, `decode`, `apply_chat_template`."""
        if self._tokenizer is None:
            # Imported when it is asked for: it takes as long as torch.
            transformers: Any = importlib.import_module("transformers")
            stack = self._stack
            tokenizer = transformers.AutoTokenizer.from_pretrained(stack.directory, local_files_only=True)
            if stack.chat_template is not None:
                tokenizer.chat_template = stack.chat_template.read_text(encoding="utf-8")
            self._tokenizer = tokenizer
        return self._tokenizer

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
        self._require("generate", _GENERATE)
        bodies = [prompt_body(prompt) for prompt in listed(prompts)]
        texts = [body["prompt"] if isinstance(body["prompt"], str) else None for body in bodies]
        return self._generate(bodies, texts, _each(sampling_params, len(bodies)), use_tqdm, on_output)

    def chat(
        self,
        messages: Chat | Sequence[Chat],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        **chat: Any,
    ) -> list[RequestOutput]:
        """Go on with chats, rendered by the model's template; as `generate` otherwise.

        Args:
            messages: one chat, or several, as in the API; a text is a chat in which a user says it.
            sampling_params: as of `generate`.
            use_tqdm: as of `generate`.
            chat: what else the template sees, by the API's names: tools, documents, chat_template_kwargs,
                add_generation_prompt, continue_final_message.
        """
        self._require("chat", _GENERATE)
        rendered = self._run(self._render(_chats(messages), chat))
        bodies = [{"prompt": ids} for ids in rendered]
        return self._generate(bodies, [None] * len(bodies), _each(sampling_params, len(bodies)), use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool | None = None,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Search for the most probable continuations of texts; the beams of each prompt, in order.

        Args:
            prompts: one or several.
            params: of the search.
            use_tqdm: as of `generate`.
            concurrency_limit: prompts that are searched at a time, None: as many as the engine takes.

        Raises as `generate` does.
        """
        self._require("beam_search", _GENERATE)
        bodies = [prompt_body(prompt) | params.body() for prompt in listed(prompts)]
        requests = [partial(self._search, body) for body in bodies]
        return self._run(self._many(requests, use_tqdm, at_once=concurrency_limit))

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
            partial(one, self._seeded(body | ({"max_tokens": 16} if param is None else param.body())), text)
            for body, text, param in zip(bodies, texts, params, strict=True)
        ]
        return self._run(self._many(requests, use_tqdm))

    def _seeded(self, body: dict[str, Any]) -> dict[str, Any]:
        if self._seeds is None or "seed" in body:
            return body
        return body | {"seed": self._seeds.getrandbits(63)}

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

    async def _search(self, body: dict[str, Any]) -> BeamSearchOutput:
        found = await self._complete(body, None)
        return beam_output(found, self._stack.vocabulary)


def _chats(messages: Chat | Sequence[Chat]) -> list[list[Message]]:
    """Each chat as messages. Raises ValueError for what is neither one nor several."""
    if isinstance(messages, Mapping):
        raise ValueError("messages must be a list of objects with role and content, several such, or a text")
    if isinstance(messages, str) or (messages and isinstance(messages[0], Mapping)):
        return [_messages(messages)]
    return [_messages(chat) for chat in messages]


def _messages(chat: Any) -> list[Message]:
    return [{"role": "user", "content": chat}] if isinstance(chat, str) else list(chat)


def _each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise ValueError(f"there are {count} prompts and {len(params)} sampling_params")
    return list(params)
