"""The services that an LLM runs in this process: options, tokenizer service, engine, model."""

from __future__ import annotations

import asyncio
import json
import os
import warnings
from collections.abc import Awaitable, Callable, Mapping, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

from pydantic import ValidationError

from catenary.config import ConfigError, ServiceConfig, reason
from catenary.loop_thread import in_daemon_thread
from catenary.nearest import near
from catenary.parameters import UnknownNameError
from catenary.rpc import CallCount, RpcConfig, RpcError
from catenary.telemetry import log_as_the_program_does
from catenary.text import Vocabulary
from catenary.v1 import common_pb2, router_pb2, tokenizer_pb2
from catenary_apps.llm.endpoint import LIMITS
from catenary_apps.llm.local_engine import LocalEngine
from catenary_apps.migration.launch import ENGINE as ENGINE_PREFIX
from catenary_apps.migration.launch import UP as UP_PREFIX
from catenary_apps.migration.launch import Launch
from catenary_apps.migration.serve import SERVE_OPTIONS
from catenary_apps.migration.serve_options import ServeOption
from gateway import GatewayConfig, GatewayMetrics, from_wire
from gateway.generation.requests import Requests
from gateway.generation.service import GenerationService
from gateway.pooling.service import PoolingService
from gateway.text.models import ModelRegistry
from gateway.text.pool import TokenizerPool
from gateway.text.target import TokenizerTarget
from services.engine.config import EngineConfig
from services.engine.link import CoreReady
from services.engine.model import prepare_model, resolve_source
from services.engine.option_groups import TransferOptions
from services.tokenizer.app import make_servicer, worker_setup
from services.tokenizer.config import TokenizerConfig
from services.tokenizer.rendering import read_model_files
from services.tokenizer.servicer import TokenizerServicer
from services.tokenizer.workers import Answer, Task, TaskTools

# Options of the engine that concern its network: there is none here.
_NETWORK = frozenset(
    {*RpcConfig.model_fields, *TransferOptions.model_fields, "router", "engine_name"}
    - ServiceConfig.model_fields.keys()
)
# Options of vLLM's LLM that ask for nothing here: no statistics are logged.
_IDLE = frozenset({"disable_log_stats"})
# Options of the engine for which vLLM has further values.
_BOTH = frozenset({"dtype", "task", "max_model_len", "served_model_name"})
_FLAGS = {True: "true", False: "false"}


@dataclass(frozen=True, slots=True)
class LLMOptions:
    """Options of the engine by name, and of what stands around it."""

    engine: Mapping[str, Any]
    chat_template: Path | None = None


def read_options(model: str, given: Mapping[str, Any]) -> LLMOptions:
    """Return the options of an engine from those that an LLM of this model was given.

    A name that the engine has is the engine's. Another one may be vLLM's: it is what the same option of
    `vllm serve` is to `catenary vllm-serve`. None, and an empty object or list, ask for nothing.

    Raises ValueError, one line, for what cannot be done, and UnknownNameError (a TypeError and ValueError)
    for a name that neither has.
    """
    known = EngineConfig.model_fields.keys() - _NETWORK
    own, launch = dict[str, Any](), Launch()
    launch.ask(f"{UP_PREFIX}MODEL", model)
    for name, value in given.items():
        if value is None or (isinstance(value, dict | list | tuple) and not value):
            continue
        if (name in known and not (name in _BOTH and isinstance(value, str | int))) or not _ask(
            launch, name, value, known
        ):
            own[name] = value
    for line in launch.warnings:
        warnings.warn(_in_python(line), stacklevel=5)
    asked = launch.variables({})
    asked.pop(f"{UP_PREFIX}MODEL")
    engine, around = dict[str, Any](), dict[str, str]()
    for variable, text in asked.items():
        option = variable.removeprefix(UP_PREFIX).removeprefix(ENGINE_PREFIX).lower()
        if option in known:
            engine[option] = text
        else:
            around[option] = text
    if around.pop("engines", "1") != "1":
        raise ValueError("data_parallel_size: an LLM has one engine; several are what `catenary up` is for")
    if directory := around.pop("hf_hub_cache", ""):
        # Read when the hub's library is imported, which nothing has done that did not need it.
        os.environ.setdefault("HF_HUB_CACHE", directory)
    template = around.pop("chat_template", "")
    if around:
        raise ValueError(f"{', '.join(sorted(around))}: an LLM has no server")
    return LLMOptions({**engine, **own}, Path(template) if template else None)


def make_config(options: Mapping[str, Any]) -> EngineConfig:
    """Return the engine's options by their names in docs/configuration.md. Raises ValueError, one line."""
    try:
        return EngineConfig(**options)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        name = str(problem["loc"][0]) if problem["loc"] else ""
        text = reason(name, EngineConfig.model_fields.get(name), problem)
    shown = f"{name}={options[name]!r}: " if name in options else ""
    raise ValueError(f"{shown}{text[:1].lower()}{text[1:]}{_why(name, options.get(name))}")


def _ask(launch: Launch, name: str, value: Any, known: Set[str]) -> bool:
    """Ask the launch for what an option of vLLM's means here.

    False: it is an option of ours, and vLLM has no such value. Raises ValueError, UnknownNameError.
    """
    if name in _IDLE:
        return True
    if name in _NETWORK:
        raise UnknownNameError(f"LLM has no option {name!r}: there is no network in it")
    option = _BY_NAME.get(name)
    if option is None:
        names = {*known, *_BY_NAME, *_IDLE, "seed", "progress"}
        raise UnknownNameError(f"LLM has no option {name!r}{near(name, names)}")
    try:
        option.apply(launch, _flag(name), _text(value))
    except ConfigError as error:
        if name in known:
            return False
        raise ValueError(_in_python(str(error))) from None
    return True


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return _FLAGS[value]
    if isinstance(value, dict):
        return json.dumps(value, default=str)
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _why(name: str, value: Any) -> str:
    """Return the reason of `catenary vllm-serve` for refusing a value of vLLM's that the engine does not
    know."""
    option = _BY_NAME.get(name)
    if option is None or value is None:
        return ""
    try:
        option.apply(Launch(), _flag(name), _text(value))
    except ConfigError as error:
        return f"; {str(error).partition(': ')[2]}"
    return ""


def _in_python(line: str) -> str:
    """Return a message about the flag `--some-option`, with the keyword argument's name `some_option`."""
    name, space, rest = line.removeprefix("--").partition(" ")
    name, colon, behind = name.partition(":")
    return f"{name.replace('-', '_')}{colon}{behind}{space}{rest}"


_BY_NAME: Mapping[str, ServeOption] = {
    name[2:].replace("-", "_"): option
    for option in SERVE_OPTIONS
    for name in option.names
    if name.startswith("--")
}


T = TypeVar("T")

# Nobody waits behind a task here, and texts come from the program itself.
_LONG_TASK_S = 3600.0
_LONGEST_TASK_S = 600.0


class LocalTokenizers(TokenizerPool):
    """The face that a gateway has of tokenizer services, over one model in this process."""

    def __init__(self, directory: Path, name: str, chat_template: Path | None) -> None:
        """Raise ModelFilesError (ValueError for options) if the model's files cannot be used."""
        super().__init__(
            [],
            _no_channel,
            render_timeout_s=_LONG_TASK_S,
            wait_s=0,
            silence_s=_LONG_TASK_S,
            max_message_mib=1,
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

    async def anywhere(
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
        """Return the task's answer, however long it takes."""
        async with self._turn:
            return await in_daemon_thread(partial(self._tools.answer, task), name="catenary-tokenizer")


class _Local:
    """The part of a target that a pool calls."""

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


_LONG_S = 3.0e7
_MANY = 1 << 30

Progress = Callable[[str, float | None], None]


class LocalStack:
    """Services for the requests of an offline batch. Made and used inside of one event loop."""

    def __init__(
        self,
        model: str,
        options: Mapping[str, Any],
        chat_template: Path | None,
        on_progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Bring the model to this disk, of which `on_progress` is told; nothing is loaded before `start`.

        `options`: as `read_options` takes them. Raises ValueError (one line) for options or a model that
        cannot work.
        """
        log_as_the_program_does()
        # What can be known at once is looked at before anything is fetched or converted.
        chosen = read_options(model, options)
        config = make_config({**chosen.engine, "model": model})
        self.name = config.served_model_name or resolve_source(model).name
        self.directory = prepare_model(
            model,
            cache_dir=config.cache_dir,
            progress=on_progress,
            convert_s=config.convert_timeout_s,
        )
        self.chat_template = chat_template or chosen.chat_template
        self._engine = LocalEngine(config.model_copy(update={"model": str(self.directory)}), self.name)
        self._tokenizers = LocalTokenizers(self.directory, self.name, self.chat_template)
        gateway = GatewayConfig(
            request_timeout_s=_LONG_S,
            stream_buffer_tokens=_MANY,
            max_requests=_MANY,
            max_n=LIMITS.max_n,
        )
        self.task = common_pb2.MODEL_TASK_GENERATE
        """What the model is for, known once started."""
        self._models = ModelRegistry(self._tokenizers.fetch)
        metrics = GatewayMetrics()
        self.requests = Requests(gateway, session=self._engine, models=self._models, metrics=metrics)
        self.generations = GenerationService(
            gateway, self.requests, session=self._engine, tokenizers=self._tokenizers
        )
        self.poolings = PoolingService(
            gateway, self.requests, session=self._engine, tokenizers=self._tokenizers
        )

    async def start(self, on_progress: Progress) -> None:
        """Load the model. Raises EngineStartError."""
        info = await self._engine.start(on_progress)
        self.task = info.tasks[0]
        self._models.update([router_pb2.ServedModel(info=info, serving_engines=1)])
        await self._models.refresh()

    @property
    def ready(self) -> CoreReady:
        """The engine's description. Raises RuntimeError before it is started."""
        if self._engine.ready is None:
            raise RuntimeError("the engine has not started")
        return self._engine.ready

    @property
    def max_running(self) -> int:
        """Sequences that run at once, once started."""
        return self.ready.capacity.max_running

    @property
    def vocabulary(self) -> Vocabulary:
        """The decoder of the model's tokens, once started."""
        return self._models.known(self.name).vocabulary

    async def stop(self) -> None:
        """End the engine. Idempotent."""
        await self._engine.stop()
