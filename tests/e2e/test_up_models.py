"""`catenary up` with a chat model and an embedding model at once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.up import Up, wait_for

pytestmark = [pytest.mark.model, pytest.mark.long]

START_S = 150.0


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    models = ("--model", "chat=smollm2", "--model", "embed=minilm")
    running = Up(tmp_path, *models, "--quantization", "chat=int8")
    try:
        running.line_with("models: chat, embed", START_S)
        running.line_with("ready in", START_S)
        yield running
    finally:
        running.close()


def post(up: Up, path: str, **body: Any) -> Any:
    return httpx2.post(f"{up.url}{path}", json=body, timeout=60)


def test_both_answer(up: Up) -> None:
    listed = httpx2.get(f"{up.url}/v1/models").json()["data"]
    assert {model["id"]: model["tasks"] for model in listed} == {"chat": ["generate"], "embed": ["embed"]}
    # The gateway may still be fetching a tokenizer.
    wait_for(lambda: up.ask(model="chat").status_code == 200, 15)
    wait_for(lambda: post(up, "/v1/embeddings", model="embed", input="hello").status_code == 200, 15)
    documents = ["Berlin is in Germany.", "Paris is the capital of France.", "Bananas are yellow."]
    body = {"model": "embed", "query": "What is the capital of France?", "documents": documents}
    ranked = post(up, "/v1/rerank", **body)
    assert [result["index"] for result in ranked.json()["results"]] == [1, 0, 2]
    vector = post(up, "/v1/embeddings", model="embed", input="hello").json()["data"][0]["embedding"]
    assert len(vector) == 384
    assert post(up, "/v1/embeddings", model="chat", input="hello").status_code == 400
    # What one model's weights are packed as is nothing to the other's.
    chat, embed = ((up.scratch / "logs" / f"engine-{index}.log").read_text() for index in (0, 1))
    (size,) = re.findall(r"weight_bytes=(\d+)", chat)
    assert int(size) < 200_000_000
    assert "kernels compute the encoder" not in embed
