"""What the gateway stores, put together: responses."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from fastapi import APIRouter

from gateway import routes
from gateway.config import GatewayConfig
from gateway.generation.service import GenerationService
from gateway.responses import (
    BackgroundRuns,
    Library,
    ResponsesService,
    ResponseStore,
    SqliteStore,
    StoreLimits,
)
from gateway.state import StateDirectory

_MIB = 1 << 20
_DAY_S = 86400.0


class StoredApis:
    """The parts that keep something, and their life."""

    def __init__(self, config: GatewayConfig, generation: GenerationService) -> None:
        """Raises StartRefused: a configured directory cannot be written."""
        self._directory = StateDirectory.open(config.state_dir, config.port)
        self._store = _response_store(config, self._directory)
        endpoint = routes.responses.ResponsesEndpoint()
        self._library = Library(self._store, int(config.max_body_mib * _MIB))
        self._background: BackgroundRuns | None = None
        if self._store is not None:
            self._background = BackgroundRuns(generation, endpoint, self._store, config.max_background)
        self._responses = ResponsesService(generation, endpoint, self._library, self._background)

    def routers(self) -> list[APIRouter]:
        """Their routes."""
        return [routes.responses.routes(self._responses, self._library)]

    async def open(self) -> None:
        """Open the stores. Raises StartRefused for one that cannot be used."""
        if self._store is not None:
            await self._store.open()

    def tasks(self) -> list[asyncio.Task[None]]:
        """What has to run meanwhile, started."""
        work: list[tuple[str, Coroutine[Any, Any, None]]] = []
        if self._background is not None:
            work.append(("background-responses", self._background.run()))
        return [asyncio.create_task(coroutine, name=name) for name, coroutine in work]

    async def close(self) -> None:
        """End what runs, and close the stores. The tasks have ended before."""
        if self._background is not None:
            await self._background.close()
        self._directory.close()


def _response_store(config: GatewayConfig, directory: StateDirectory) -> ResponseStore | None:
    if directory.path is None or not config.store_responses:
        return None
    limits = StoreLimits(
        config.max_stored_responses,
        int(config.max_stored_mib * _MIB),
        config.stored_response_days * _DAY_S,
    )
    return SqliteStore(directory.path / "responses.sqlite3", limits)
