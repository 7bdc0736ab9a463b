"""A byte forwarder between an engine and a router (or any two services) that can freeze and cut."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path


class LinkProxy:
    """Listens on a unix socket and forwards to another. What a network does to a link, on demand.

    `freeze` holds all bytes back with the connections open, as a stopped machine does; `thaw` lets them go.
    `cut` resets the connections there are; new ones work.
    """

    def __init__(self, directory: Path, target: str, name: str = "proxy") -> None:
        self._path = directory / f"{name}.sock"
        self._target = target.removeprefix("unix:")
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()

    @property
    def address(self) -> str:
        """What to dial."""
        return f"unix:{self._path}"

    async def start(self) -> None:
        """Listen."""
        self._server = await asyncio.start_unix_server(self._accept, str(self._path))

    async def stop(self) -> None:
        """Cut everything and listen no more."""
        if self._server is not None:
            self._server.close()
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def freeze(self) -> None:
        """Hold all bytes back."""
        self._flowing.clear()

    def thaw(self) -> None:
        """Let the bytes go that were held back."""
        self._flowing.set()

    def cut(self) -> None:
        """Reset every connection."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_unix_connection(self._target)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, far_writer}
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(self._forward(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _forward(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(65536):
                await self._flowing.wait()
                sink.write(data)
                await sink.drain()
        sink.close()
