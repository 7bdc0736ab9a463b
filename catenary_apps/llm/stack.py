"""Gateway, tokenizer and engine of one model in this process, without sockets between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from catenary.telemetry import log_as_the_program_does
from catenary.text import Vocabulary
from catenary.v1 import common_pb2, router_pb2
from catenary_apps.llm.endpoint import LIMITS
from catenary_apps.llm.local_engine import LocalEngine
from catenary_apps.llm.options import make_config, read_options
from catenary_apps.llm.tokenizers import LocalTokenizers
from gateway import GatewayConfig, GatewayMetrics
from gateway.generation.service import GenerationService
from gateway.pooling.service import PoolingService
from gateway.text.models import ModelBoard
from services.engine.link import CoreReady
from services.engine.model import prepare_model, resolve_source

_LONG_S = 3.0e7
_MANY = 1 << 30

Progress = Callable[[str, float | None], None]


class LocalStack:
    """What serves the requests of an offline batch. Made and used inside of one event loop."""

    def __init__(
        self,
        model: str,
        options: Mapping[str, Any],
        chat_template: Path | None,
        on_progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Brings the model to this disk, of which `on_progress` is told; nothing is loaded before `start`.

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
        self._models = ModelBoard(self._tokenizers.fetch, lambda: True, lambda _: False)
        metrics = GatewayMetrics()
        self.generations = GenerationService(
            gateway,
            session=self._engine,
            models=self._models,
            tokenizers=self._tokenizers,
            metrics=metrics,
        )
        self.poolings = PoolingService(
            gateway,
            places=self.generations,
            session=self._engine,
            models=self._models,
            tokenizers=self._tokenizers,
            metrics=metrics,
        )

    async def start(self, on_progress: Progress) -> None:
        """Load the model. Raises EngineStartError."""
        info = await self._engine.start(on_progress)
        self.task = info.tasks[0]
        self._models.update([router_pb2.ServedModel(info=info, serving_engines=1)])
        await self._models.refresh()

    @property
    def ready(self) -> CoreReady:
        """What the engine is. Raises RuntimeError before it is started."""
        if self._engine.ready is None:
            raise RuntimeError("the engine has not started")
        return self._engine.ready

    @property
    def max_running(self) -> int:
        """Sequences that run at once, once started."""
        return self.ready.capacity.max_running

    @property
    def vocabulary(self) -> Vocabulary:
        """What decodes the model's tokens, once started."""
        return self._models.known(self.name).vocabulary

    async def stop(self) -> None:
        """End the engine. Idempotent."""
        await self._engine.stop()
