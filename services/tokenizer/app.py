"""The tokenizer service put together: the order of its start and of its end."""

from __future__ import annotations

import asyncio
import os

from catenary.config import ConfigError, unknown_variables
from catenary.parsers import NO_PARSER
from catenary.rpc import CallCount, Role, RpcServer
from catenary.runtime import StartRefused, mark_started
from catenary.telemetry import configure_logging, configure_tracing, get_logger
from catenary.v1 import tokenizer_pb2_grpc
from services.tokenizer.config import TokenizerConfig
from services.tokenizer.execution import (
    WAITING,
    WORKERS,
    SmallChats,
    TaskPool,
    TaskRunner,
    renderer_of_small_chats,
)
from services.tokenizer.rendering import (
    JsonLimits,
    ModelFiles,
    ModelFilesError,
    TemplateBudget,
    read_model_files,
)
from services.tokenizer.servicer import TokenizerServicer
from services.tokenizer.workers import PoolLimits, WorkerPool, WorkerReady, WorkerSetup

SERVICE = "catenary.v1.TokenizerService"
ACCESS = {f"/{SERVICE}/": frozenset({Role.CLIENT})}

MIB = 1024 * 1024
STOP_GRACE_S = 1.0

_log = get_logger(__name__)


class TokenizerService:
    """One tokenizer service in this process. Built inside of the running loop.

    Raises StartRefused, here or at `start`, if the model cannot be served or an address not be bound.
    """

    def __init__(self, config: TokenizerConfig) -> None:
        self._config = config
        _check_paths(config)
        try:
            self._files = read_model_files(config.model_dir, chat_template=config.chat_template)
        except ModelFilesError as error:
            raise StartRefused(str(error)) from None
        self.server = RpcServer.from_config(config, ACCESS)
        self._setup = worker_setup(config, self._files)
        self.pool = WorkerPool(self._setup, _pool_limits(config), on_change=self._on_pool_change)
        self.servicer: TokenizerServicer | None = None

    async def start(self) -> tuple[str, ...]:
        """Start the workers, then listen. Returns the bound addresses; from then on it is SERVING."""
        # At the same time as the workers, which load the same files.
        small = asyncio.create_task(with_small_chats(self.pool, self._setup, self._config))
        try:
            ready = await self.pool.start()
        except ModelFilesError as error:
            raise StartRefused(f"{self._config.model_dir}: {error}") from None
        finally:
            tasks = await small
        if not ready.has_chat_template:
            _log.warning("the model has no chat template: chats are refused")
        servicer = self.servicer = make_servicer(self._config, self._files, tasks, ready, self.server.calls)
        tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(servicer, self.server.grpc)
        try:
            bound = await self.server.start()
        except BaseException:
            await self.pool.stop()
            raise
        self._on_pool_change()
        _log.info(
            "parsers",
            tool=servicer.digest.tool_parser or NO_PARSER,
            reasoning=servicer.digest.reasoning_parser or NO_PARSER,
        )
        return bound

    async def drain(self) -> None:
        """Take nothing new and wait, up to `drain_s`, for what runs."""
        self.server.begin_drain()
        if self.servicer is not None:
            self.servicer.streams.drain()
        await self.server.drain(self._config.drain_s)

    async def stop(self) -> None:
        """End the calls that still run, then the workers."""
        await self.server.stop(STOP_GRACE_S)
        await self.pool.stop()

    def _on_pool_change(self) -> None:
        workers = len(self.pool.pids)
        WORKERS.set(workers)
        WAITING.set(self.pool.waiting)
        self.server.health.set(SERVICE, workers > 0)


async def serve(config: TokenizerConfig, stop: asyncio.Event) -> int:
    """Run the service until `stop` is set, then drain and end it. Returns the exit code."""
    configure_logging(level=config.log_level, fmt=config.log_format, service="tokenizer")
    configure_tracing("tokenizer")
    for line in unknown_variables(os.environ, ["CATENARY_TOKENIZER_"]):
        _log.warning(line)
    service = TokenizerService(config)
    await service.start()
    mark_started()
    await stop.wait()
    await service.drain()
    await service.stop()
    return 0


def _check_paths(config: TokenizerConfig) -> None:
    """Raise ConfigError for an option that names a path with nothing, or something else, at it."""
    directory, template = config.model_dir, config.chat_template
    if not directory.is_dir():
        reason = "is not a directory" if directory.exists() else "does not exist"
        raise ConfigError(f"--model-dir: {directory} {reason}")
    if template is not None and not template.is_file():
        raise ConfigError(f"--chat-template: {template} is not a file")


def worker_setup(config: TokenizerConfig, files: ModelFiles) -> WorkerSetup:
    """Return the setup of a model's workers."""
    return WorkerSetup(
        files,
        max_rendered_chars=config.max_rendered_chars,
        max_answer_tokens=config.max_answer_tokens,
        max_seconds=config.task_timeout_s,
        memory_bytes=config.worker_memory_mib * MIB,
        json_limits=JsonLimits(max_depth=config.max_json_depth, max_values=config.max_json_values),
        request_templates=_template_budget(config),
        constraint_memory_bytes=config.constraint_memory_mib * MIB,
        pair_instruction=config.pair_instruction,
    )


async def with_small_chats(pool: TaskPool, setup: WorkerSetup, config: TokenizerConfig) -> TaskPool:
    """Return `pool` with small chats rendered in this process, where the model's template allows it."""
    if not config.small_chat_bytes:
        return pool
    renderer = await asyncio.to_thread(renderer_of_small_chats, setup, config.small_chat_bytes)
    return pool if renderer is None else SmallChats(pool, renderer, config.small_chat_bytes)


def make_servicer(
    config: TokenizerConfig, files: ModelFiles, pool: TaskPool, ready: WorkerReady, calls: CallCount
) -> TokenizerServicer:
    """Return the gRPC servicer over `pool`. `calls` are those of its server."""
    return TokenizerServicer(
        config,
        TaskRunner(config, pool),
        calls,
        tokenizer_json=files.tokenizer_json,
        ready=ready,
        parsers=ready.parsers.chosen(config.tool_parser, config.reasoning_parser),
    )


def _template_budget(config: TokenizerConfig) -> TemplateBudget | None:
    if not config.allow_request_templates:
        return None
    return TemplateBudget(
        max_bytes=config.max_template_kib << 10,
        seconds=config.template_timeout_s,
        memory_bytes=config.template_memory_mib * MIB,
    )


def _pool_limits(config: TokenizerConfig) -> PoolLimits:
    return PoolLimits(
        workers=config.workers,
        short_bytes=config.short_text_kib << 10,
        queue=config.queue_size,
        queue_bytes=config.queue_mib * MIB,
        queue_timeout_s=config.queue_timeout_s,
        task_timeout_s=config.task_timeout_s,
        start_timeout_s=config.start_timeout_s,
    )
