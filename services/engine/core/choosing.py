"""Which core an engine's model needs: one that generates, or one that embeds or scores."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from catenary.directories import NoHomeError, expanded
from services.engine.core.errors import StartError
from services.engine.link import BlockingLink, CoreReady, ToCore
from services.engine.model import ModelError, Task, check_directory, find_task, prepare_model
from services.engine.options import EngineOptions

Progress = Callable[[str, float | None], None]


class Loop(Protocol):
    """What a core's process drives."""

    def handle(self, message: ToCore) -> None:
        """Takes one message."""

    def run(self) -> None:
        """Returns when the servicer stops the core."""


class StartedEngine(Protocol):
    """What a core's process starts and ends."""

    @property
    def ready(self) -> CoreReady:
        """What the servicer is told."""

    def close(self) -> None:
        """Ends what it holds."""


def start(options: EngineOptions, progress: Progress) -> tuple[StartedEngine, Callable[[BlockingLink], Loop]]:
    """Loads the model and makes it ready; and what makes its loop. Raises StartError."""
    progress("loading torch and the model's files", 0.05)
    directory, task = _find(options, progress)
    # Loaded here and not above: torch takes seconds, and its absence has to be reported over the link.
    if task is Task.GENERATE:
        startup: Any = importlib.import_module("services.engine.core.startup")
        loop: Any = importlib.import_module("services.engine.core.loop")
        engine = startup.start_engine(options.model_copy(update={"model": str(directory)}), progress)
        return engine, lambda link: loop.CoreLoop(link, engine)
    pooled: Any = importlib.import_module("services.engine.core.pooled")
    engine = pooled.start_pooled(options, directory, task, progress)
    return engine, lambda link: pooled.PooledLoop(link, engine)


def _find(options: EngineOptions, progress: Progress) -> tuple[Path, Task]:
    try:
        cache = expanded(options.cache_dir) if options.cache_dir else None
        directory = prepare_model(
            options.model,
            cache_dir=cache,
            progress=lambda line: progress(line, None),
            convert_s=options.convert_timeout_s,
        )
        return directory, find_task(directory, check_directory(directory), options.task)
    except (ModelError, NoHomeError) as error:
        raise StartError(" ".join(str(error).split())) from error
