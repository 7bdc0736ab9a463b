"""Batches for tests: input files, and waiting for an end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any, Literal

import openai
from openai.types import Batch

from tests.support.gateway import MODEL

CHAT = "/v1/chat/completions"
COMPLETIONS: Literal["/v1/completions"] = "/v1/completions"
FINAL = ("completed", "failed", "expired", "cancelled")


def line(custom_id: str, body: dict[str, Any], url: str = COMPLETIONS) -> dict[str, Any]:
    """A line of an input file; the model is filled in."""
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": MODEL, **body}}


def jsonl(lines: Iterable[Any]) -> bytes:
    """Lines as a file."""
    return b"".join(json.dumps(item).encode() + b"\n" for item in lines)


async def started(client: openai.AsyncOpenAI, lines: Iterable[Any], url: Any = COMPLETIONS) -> Batch:
    """Upload lines and begin a batch."""
    file = await client.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
    return await client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")


async def ended(client: openai.AsyncOpenAI, batch: Batch, timeout_s: float = 20.0) -> Batch:
    """Wait for the end of a batch."""
    async with asyncio.timeout(timeout_s):
        while batch.status not in FINAL:
            await asyncio.sleep(0.05)
            batch = await client.batches.retrieve(batch.id)
    return batch


async def results(client: openai.AsyncOpenAI, file_id: str | None) -> dict[str, dict[str, Any]]:
    """The lines of a result file by their custom ids, each of which may be there once."""
    if file_id is None:
        return {}
    text = (await client.files.content(file_id)).text
    found = [json.loads(item) for item in text.splitlines()]
    by_id = {item["custom_id"]: item for item in found}
    assert len(by_id) == len(found)
    return by_id
