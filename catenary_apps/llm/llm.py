"""Batches of prompts in one process."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from catenary.v1 import common_pb2
from catenary_apps.llm.endpoint import OfflineRequest
from catenary_apps.llm.engine_view import EngineView, Lacking, ModelConfig, view_of
from catenary_apps.llm.outputs import BeamSearchOutput, RequestOutput, beam_output, request_output
from catenary_apps.llm.pooled import PooledCalls
from catenary_apps.llm.prompts import (
    Chat,
    GivenPrompt,
    Message,
    Prompt,
    chat_arguments,
    check_arguments,
    read_chats,
    read_one,
    read_params,
    read_prompts,
)
from catenary_apps.llm.sampling_params import BeamSearchParams, SamplingParams
from gateway import Caller
from gateway.generation.chat import prepare_chat
from gateway.generation.service import collect
from gateway.routes.completions import prepare_completion
from gateway.schemas.base import parse_request
from gateway.schemas.chat import ChatRequest

_GENERATE = (common_pb2.MODEL_TASK_GENERATE,)


class LLM(PooledCalls, Lacking):
    """A model in this process, for batches: no server, no network.

    The engine ends, and its memory is given back, when this is closed, left as a context manager, or garbage,
    and when the program ends. Several threads may call it. Ctrl-C ends what a call has begun.
    """

    _LACKS = {
        "sleep": "close() gives the memory back, and a new LLM loads the model again",
        "wake_up": "close() gives the memory back, and a new LLM loads the model again",
        "collective_rpc": "no code of a program's runs in the engine",
        "apply_model": "no code of a program's runs in the engine",
        "reset_prefix_cache": "LLM(enable_prefix_caching=False) has none",
        "set_tokenizer": "the tokenizer is that of the model's directory",
        "start_profile": "catenary profile records what an engine does",
        "stop_profile": "catenary profile records what an engine does",
        "get_metrics": "an LLM keeps no statistics; catenary bench throughput measures",
        "reward": "use encode",
        "preprocess_chat": "chat renders, and get_tokenizer().apply_chat_template does",
    }

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
        self._model = model
        self._seeds = None if seed is None else random.Random(seed)
        self._tokenizer: Any = None

    def get_tokenizer(self) -> Any:
        """Return the model's tokenizer as transformers has it: `encode`, `decode`, `apply_chat_template`."""
        if self._tokenizer is None:
            # Imported when it is asked for: it takes as long as torch.
            transformers: Any = importlib.import_module("transformers")
            stack = self._stack
            tokenizer = transformers.AutoTokenizer.from_pretrained(stack.directory, local_files_only=True)
            if stack.chat_template is not None:
                tokenizer.chat_template = stack.chat_template.read_text(encoding="utf-8")
            self._tokenizer = tokenizer
        return self._tokenizer

    @property
    def llm_engine(self) -> EngineView:
        """The engine as programs for vLLM read it: `model_config`, `cache_config`, `tokenizer`, ..."""
        stack = self._stack
        model = ModelConfig(self._model, stack.name, stack.directory, stack.ready.model)
        return view_of(model, stack.ready.capacity, self.get_tokenizer)

    @property
    def model_config(self) -> ModelConfig:
        """The model as programs for vLLM read it: `max_model_len`, `dtype`, `hf_config`, ..."""
        return self.llm_engine.model_config

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of a call without sampling_params: those of the model's
        generation_config.json, and for the rest the defaults of SamplingParams, 16 tokens among them."""
        return SamplingParams(**self.model_config.get_diff_sampling_param())

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
        on_output: Callable[[RequestOutput], None] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Go on with texts; one output for each prompt, in order.

        Args:
            prompts: one or several.
            sampling_params: for all, or one for each; None: get_default_sampling_params().
            use_tqdm: show a bar; None: as the LLM was told.
            on_output: is told each output as it ends, on another thread; who interrupts the call has these.
            others: arguments of vLLM's that there are none of here, as lora_request; None asks for nothing.

        Raises:
            TypeError: what is given is of a wrong kind.
            ValueError: a prompt or parameter cannot be honoured; nothing is generated then, or no more.
            RuntimeError: the engine failed.
        """
        self._require("generate", _GENERATE)
        check_arguments("generate", others)
        if not (on_output is None or callable(on_output)):
            raise TypeError(f"on_output must be a function, not {type(on_output).__name__}")
        given = read_prompts(prompts)
        params = read_params(SamplingParams, "sampling_params", sampling_params, len(given))
        return self._generate(given, params, use_tqdm, on_output)

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
                add_generation_prompt, continue_final_message, reasoning_effort, and chat_template, the name
                of one of the model's templates.

        Raises as `generate` does.
        """
        self._require("chat", _GENERATE)
        seen = chat_arguments(chat)
        chats = read_chats(messages)
        params = read_params(SamplingParams, "sampling_params", sampling_params, len(chats))
        rendered = self._run(self._render(chats, seen))
        return self._generate([GivenPrompt(ids, None) for ids in rendered], params, use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool | None = None,
        concurrency_limit: int | None = None,
        **others: Any,
    ) -> list[BeamSearchOutput]:
        """Search for the most probable continuations of texts; the beams of each prompt, in order.

        Args:
            prompts: one or several.
            params: of the search.
            use_tqdm: as of `generate`.
            concurrency_limit: prompts that are searched at a time, None: as many as the engine takes.
            others: as of `generate`.

        Raises as `generate` does.
        """
        self._require("beam_search", _GENERATE)
        check_arguments("beam_search", others)
        search = read_one(BeamSearchParams, "params", params).body()
        requests = [partial(self._search, prompt.body | search) for prompt in read_prompts(prompts)]
        return self._run(self._many(requests, use_tqdm, at_once=concurrency_limit))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _generate(
        self,
        prompts: Sequence[GivenPrompt],
        params: Sequence[SamplingParams | None],
        use_tqdm: bool | None,
        on_output: Callable[[RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        async def one(body: dict[str, Any], text: str | None) -> RequestOutput:
            output = await self._complete(body, text)
            if on_output is not None:
                on_output(output)
            return output

        default = self.get_default_sampling_params()
        requests = [
            partial(one, self._seeded(prompt.body | (param or default).body()), prompt.text)
            for prompt, param in zip(prompts, params, strict=True)
        ]
        return self._run(self._many(requests, use_tqdm))

    def _seeded(self, body: dict[str, Any]) -> dict[str, Any]:
        if self._seeds is None or "seed" in body:
            return body
        return body | {"seed": self._seeds.getrandbits(63)}

    async def _render(self, chats: Sequence[list[Message]], chat: Mapping[str, Any]) -> list[list[int]]:
        stack, prompts = self._stack, []
        caller = Caller()
        for messages in chats:
            body = {"model": stack.name, "messages": messages, **chat}
            fields = parse_request(ChatRequest, body, stack.requests.limits)
            async with stack.requests.detached(caller) as request:
                prepared = prepare_chat(fields, stack.requests.models.require(fields.model), caller)
                plan = await stack.generations.plan(prepared, request)
            prompts.append(list(plan.prompts[0]))
        return prompts

    async def _complete(self, body: dict[str, Any], prompt: str | None) -> RequestOutput:
        stack = self._stack
        asked = {"model": stack.name, "return_token_ids": True, **body}
        fields = parse_request(OfflineRequest, asked, stack.requests.limits)
        async with stack.requests.detached(Caller()) as request:
            # As vLLM's: without a limit, to the end of the context.
            prepared = prepare_completion(
                fields,
                request.admit(fields),
                request.caller,
                id_prefix="offline-",
                default_max_tokens=None,
            )
            plan = await stack.generations.plan(prepared, request)
            async with stack.generations.run(plan, request) as running:
                await running.begin()
                return request_output(running.generation, await collect(running.generation), prompt)

    async def _search(self, body: dict[str, Any]) -> BeamSearchOutput:
        found = await self._complete(body, None)
        return beam_output(found, self._stack.vocabulary)
