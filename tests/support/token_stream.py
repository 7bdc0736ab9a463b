"""A streamed completion that is read in the background, with what came and when."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from tests.support.http import Connection, request_bytes
from tests.support.waiting import eventually

COMPLETIONS = "/v1/completions"


class TokenStream:
    """One request. Its fields grow while the answer comes in; `finish` waits for the end.

    `broken`: the connection ended in the middle of the answer, or before it.
    """

    def __init__(self, address: str, body: dict[str, Any], path: str = COMPLETIONS) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.text = ""
        self.error: dict[str, Any] | None = None
        self.finish_reason: str | None = None
        self.done = False
        self.broken = False
        self.after_done = b""
        self.arrivals: list[float] = []
        self._request = request_bytes("POST", path, {"stream": True, **body})
        self._task = asyncio.create_task(self._run(address))

    @property
    def longest_gap_s(self) -> float:
        """Seconds between two pieces of text, at the most."""
        pairs = zip(self.arrivals, self.arrivals[1:], strict=False)
        return max((after - before for before, after in pairs), default=0.0)

    @property
    def ended(self) -> bool:
        """Whether nothing comes any more."""
        return self._task.done()

    async def begun(self, pieces: int = 1) -> None:
        """Wait until so many pieces of text are here."""
        await eventually(
            lambda: len(self.arrivals) >= pieces or self.ended, "the stream's first text", timeout_s=20
        )
        if self.ended and len(self.arrivals) < pieces:
            raise AssertionError(f"the stream ended early: {self.status} {self.error}")

    async def finish(self, timeout_s: float = 30.0) -> TokenStream:
        """Wait for the end of the answer."""
        await asyncio.wait_for(self._task, timeout_s)
        return self

    async def _run(self, address: str) -> None:
        try:
            connection = await Connection.to(address)
            try:
                await connection.send(self._request)
                await self._read(connection)
            finally:
                connection.close()
        except (OSError, EOFError):
            self.broken = True

    async def _read(self, connection: Connection) -> None:
        self.status, self.headers = await connection.head()
        if self.headers.get("transfer-encoding") != "chunked":
            body = await connection.reader.readexactly(int(self.headers["content-length"]))
            self.error = json.loads(body)["error"]
            return
        pending = b""
        while chunk := await connection.chunk():
            *events, pending = (pending + chunk).split(b"\n\n")
            for event in events:
                self._take(event.removeprefix(b"data: "))
        self.after_done += pending

    def _take(self, data: bytes) -> None:
        if self.done:
            self.after_done += data
        elif data == b"[DONE]":
            self.done = True
        elif "error" in (event := json.loads(data)):
            self.error = event["error"]
        else:
            for choice in event["choices"]:
                if choice["text"]:
                    self.text += choice["text"]
                    self.arrivals.append(time.monotonic())
                self.finish_reason = choice["finish_reason"] or self.finish_reason
