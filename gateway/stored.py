"""APIs that store objects: responses, files and batches, with their stores and background work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from starlette.types import ASGIApp

from catenary.runtime import StartRefused
from gateway.batches import store as batches
from gateway.batches.files import FileLimits, FileStore
from gateway.batches.job import JobLimits
from gateway.batches.runner import BatchRunner, RunnerLimits
from gateway.batches.service import BatchLimits, BatchService
from gateway.batches.store import BatchStore
from gateway.config import GatewayConfig
from gateway.generation.requests import Requests
from gateway.generation.service import GenerationService
from gateway.responses import store as responses
from gateway.responses.background import BackgroundRuns
from gateway.responses.service import Library, ResponsesService
from gateway.responses.store import ResponseStore, StoreLimits
from gateway.routes.batches import batch_routes, file_routes
from gateway.routes.responses import response_routes
from gateway.routing import Routes
from gateway.state.database import Database, StateDirectory

_MIB = 1 << 20
_DAY_S = 86400.0


class StoredApis:
    """Storing parts of the gateway, from `open` to `close`."""

    def __init__(
        self, config: GatewayConfig, generation: GenerationService, serves: Callable[[str], bool]
    ) -> None:
        """Build the parts. `serves`: whether requests for a model can be answered now.

        Raise StartRefused if a configured directory cannot be written."""
        self._config = config
        self._directory = StateDirectory.open(config.state_dir, config.port)
        self.databases: list[Database] = []
        path = self._directory.path
        store = background = None
        if path is not None and config.store_responses:
            database = self._database(path / "responses.sqlite3", responses.SCHEMA, responses.VERSION)
            limits = StoreLimits(
                config.max_stored_responses,
                int(config.max_stored_mib * _MIB),
                config.stored_response_days * _DAY_S,
            )
            store = ResponseStore(database, limits, lease_s=config.lease_s)
            background = BackgroundRuns(
                generation,
                store,
                max_running=config.max_background,
                max_event_bytes=int(config.max_event_mib * _MIB),
                max_streams=config.max_event_streams,
                lease_s=config.lease_s,
            )
        self.store: ResponseStore | None = store
        self.background = background
        self._library = Library(store, int(config.max_body_mib * _MIB))
        self._responses = ResponsesService(
            generation,
            self._library,
            background,
            max_references=config.max_item_references,
        )
        self._batches = None
        if path is not None and config.batches:
            database = self._database(path / "batches.sqlite3", batches.SCHEMA, batches.VERSION)
            self._batches = _batch_service(config, generation.requests, database, serves)
        self._care: asyncio.Task[None] | None = None
        self._running: asyncio.Task[None] | None = None

    def routers(self) -> list[Routes]:
        made = [response_routes(self._responses, self._library)]
        if self._batches is not None:
            made += [file_routes(self._batches), batch_routes(self._batches)]
        return made

    def use(self, app: ASGIApp, endpoints: Sequence[str]) -> None:
        """Set the application that answers the lines of batches, and the paths that a batch may have."""
        if self._batches is not None:
            self._batches.runner.use(app, endpoints)

    async def open(self) -> None:
        """Open the databases. Raise StartRefused for one that cannot be used."""
        opened: list[Database] = []
        try:
            for database in self.databases:
                await database.open()
                opened.append(database)
        except StartRefused:
            for database in opened:
                await database.close()
            raise

    def tasks(self) -> list[asyncio.Task[None]]:
        """Start the background work."""
        if self.background is not None:
            self._care = asyncio.create_task(self.background.run(), name="background-responses")
        if self._batches is not None:
            self._running = asyncio.create_task(self._batches.runner.run(), name="batches")
        return [task for task in (self._care, self._running) if task is not None]

    async def pause(self) -> None:
        """Release all batches as they are. Background responses go on."""
        await _cancelled(self._running)

    def cut_off(self) -> None:
        """End the streams of background responses with an error: the server stops."""
        if self.background is not None:
            self.background.streams.cut_off()

    async def close(self) -> None:
        """End the background work and close the stores, after `pause`."""
        await _cancelled(self._care)
        if self.background is not None:
            await self.background.close()
        for database in self.databases:
            await database.close()
        self._directory.close()

    def _database(self, path: Path, schema: str, version: int) -> Database:
        database = Database(path, schema, version, reserve_bytes=int(self._config.state_reserve_mib * _MIB))
        self.databases.append(database)
        return database


def _batch_service(
    config: GatewayConfig, requests: Requests, database: Database, serves: Callable[[str], bool]
) -> BatchService:
    files = FileStore(database, FileLimits(config.max_files, int(config.max_files_mib * _MIB)))
    store = BatchStore(database, lease_s=config.lease_s, max_batches=config.max_batches)
    runner = BatchRunner(
        store,
        files,
        limits=RunnerLimits(
            config.batches_at_work,
            config.batch_lines_at_work,
            config.batch_priority,
            config.upload_timeout_s,
            config.batch_model_wait_s,
        ),
        job_limits=JobLimits(
            config.max_batch_lines,
            int(config.max_body_mib * _MIB),
            config.max_body_values,
            config.batch_lines_at_work,
        ),
        serves=serves,
    )
    limits = BatchLimits(int(config.max_file_mib * _MIB), config.upload_timeout_s, config.file_days * _DAY_S)
    return BatchService(requests, files=files, batches=store, runner=runner, limits=limits)


async def _cancelled(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.wait({task})
