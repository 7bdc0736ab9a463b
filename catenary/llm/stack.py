"""Gateway, tokenizer and engine of one model in this process, without sockets between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from catenary.llm.local_engine import LocalEngine, make_config
from catenary.llm.tokenizers import LocalTokenizers
from catenary.telemetry import log_as_the_program_does
from catenary.v1 import router_pb2
from gateway import GatewayConfig, GatewayMetrics
from gateway.generation import GenerationService
from gateway.pooling import PoolingService
from gateway.text import ModelBoard
from services.engine.model import prepare_model, resolve_source

_LONG_S = 3.0e7
_MANY = 1 << 30

Progress = Callable[[str, float | None], None]


class LocalStack:
    """What serves the requests of an offline batch. Made and used inside of one event loop."""

    def __init__(self, model: str, options: Mapping[str, Any], chat_template: Path | None) -> None:
        """Brings the model to this disk; nothing is loaded before `start`.

        Raises ValueError (one line) for options or a model that cannot work.
        """
        log_as_the_program_does()
        self.name = resolve_source(model).name
        directory = prepare_model(model)
        self._engine = LocalEngine(make_config({**options, "model": str(directory)}), self.name)
        self._tokenizers = LocalTokenizers(directory, self.name, chat_template)
        config = GatewayConfig(
            request_timeout_s=_LONG_S,
            stream_buffer_tokens=_MANY,
            max_requests=_MANY,
            max_n=128,
        )
        self.max_running = 0
        """Sequences that run at once, known once started."""
        self._models = ModelBoard(self._tokenizers.fetch, lambda: True, lambda _: False)
        metrics = GatewayMetrics()
        self.generations = GenerationService(
            config,
            session=self._engine,
            models=self._models,
            tokenizers=self._tokenizers,
            metrics=metrics,
        )
        self.poolings = PoolingService(
            config,
            places=self.generations,
            session=self._engine,
            models=self._models,
            tokenizers=self._tokenizers,
            metrics=metrics,
        )

    async def start(self, on_progress: Progress) -> None:
        """Load the model. Raises EngineStartError."""
        info = await self._engine.start(on_progress)
        self.max_running = self._engine.max_running
        self._models.update([router_pb2.ServedModel(info=info, serving_engines=1)])
        await self._models.refresh()

    async def stop(self) -> None:
        """End the engine. Idempotent."""
        await self._engine.stop()
