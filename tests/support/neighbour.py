"""A stream that runs beside an attack and must not notice it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from tests.support.gateway import COMPLETIONS, Stack


@asynccontextmanager
async def neighbour(stack: Stack, say: Callable[[str], None], *, tokens: int = 900) -> AsyncIterator[None]:
    """A long stream beside the block: its text must be that of its run alone. Says its longest gap, and
    demands that this process, which does all the work, never computed for seconds between two chunks.
    """
    fields = {"prompt": "neighbour", "max_tokens": tokens, "seed": 3}
    alone = (await stack.complete(**fields)).json()["choices"][0]["text"]
    connection = await stack.open_stream(COMPLETIONS, fields | {"stream": True})
    gaps: list[float] = []
    work: list[float] = []

    async def read() -> str:
        await connection.head()
        text, last, done = "", time.perf_counter(), time.process_time()
        while chunk := await connection.chunk():
            gaps.append(time.perf_counter() - last)
            work.append(time.process_time() - done)
            last, done = time.perf_counter(), time.process_time()
            for line in chunk.decode().split("\n\n"):
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
        return text

    reading = asyncio.create_task(read())
    try:
        yield
    finally:
        text = await asyncio.wait_for(reading, 60)
        connection.close()
    assert text == alone
    say(f"longest gap of a stream beside bad input: {max(gaps) * 1000:.0f} ms over {len(gaps)} chunks")
    assert max(work) < 2
