"""Users' bug reports, section E: embeddings and reranking; and two advisories about them."""

from __future__ import annotations

import asyncio
import struct
from pathlib import Path
from typing import Any

import openai
import pytest

from catenary_testing.engine import Script, pack_vector, vector_of
from tests.support.gateway import MODEL, Stack, script
from tests.support.stack_fixtures import StartStack
from tests.support.tiny_tokenizer import VOCAB_SIZE, byte_ids

WIDTH = 16


def embedding() -> Script:
    return script(model={"task": "embed", "embedding_width": WIDTH, "any_dimensions": True})


@pytest.fixture
async def stack(start_stack: StartStack) -> Stack:
    return await start_stack(embedding())


def expected(text: str, dimensions: int = 0) -> list[float]:
    packed = pack_vector(vector_of(byte_ids(text), WIDTH, dimensions))
    return list(struct.unpack(f"<{len(packed) // 4}f", packed))


async def test_c42_what_the_client_asks_for_by_default(stack: Stack) -> None:
    async with openai.AsyncOpenAI(base_url=f"{stack.address}/v1", api_key="x", max_retries=0) as client:
        by_default = await client.embeddings.create(model=MODEL, input="QZX")
        numbers = await client.embeddings.create(model=MODEL, input="QZX", encoding_format="float")
        assert by_default.data[0].embedding == numbers.data[0].embedding == expected("QZX")
        for width in (1, 4, WIDTH):
            cut = await client.embeddings.create(model=MODEL, input="QZX", dimensions=width)
            assert cut.data[0].embedding == expected("QZX", width)
        wrong: Any = "xyz"
        with pytest.raises(openai.BadRequestError) as caught:
            await client.embeddings.create(model=MODEL, input="QZX", encoding_format=wrong)
        assert caught.value.param == "encoding_format"
        with pytest.raises(openai.BadRequestError) as caught:
            await client.embeddings.create(model=MODEL, input="QZX", dimensions=WIDTH + 1)
        assert caught.value.param == "dimensions"


async def test_c43_rerank_sorts_and_cuts(stack: Stack) -> None:
    documents = ["XQ", "QZX", "W", "XQ"]
    body = {"query": "QZX", "documents": documents}
    (best,) = (await stack.post("/v1/rerank", {**body, "top_n": 1})).json()["results"]
    assert (best["index"], best["document"]) == (1, {"text": "QZX"})
    results = (await stack.post("/v1/rerank", body)).json()["results"]
    scores = [result["relevance_score"] for result in results]
    assert scores == sorted(scores, reverse=True)
    assert scores[0] == best["relevance_score"] == max(scores)
    # Equal documents keep their own places.
    assert sorted(result["index"] for result in results) == [0, 1, 2, 3]
    assert len({result["relevance_score"] for result in results if result["index"] in (0, 3)}) == 1
    assert (await stack.post("/v1/rerank", {**body, "documents": []})).status == 400


@pytest.mark.parametrize("kind", ["encoder", "cross-encoder", "decoder"])
def test_c44_neighbours_change_nothing(kind: str, tmp_path: Path) -> None:
    from services.engine.model import Task
    from tests.support.encoders import save_cross_encoder, save_encoder
    from tests.support.pooled_core import LocalPooledCore
    from tests.support.torch_engine import save_tiny_model

    if kind == "decoder":
        save_tiny_model("llama", tmp_path, max_position_embeddings=320)
    else:
        (save_encoder if kind == "encoder" else save_cross_encoder)("bert", tmp_path)
    core = LocalPooledCore(tmp_path, Task.SCORE if kind == "cross-encoder" else Task.EMBED)
    lengths = (3, 300, 17, 64, 150, 9, 255, 33)
    documents = [[5 + (7 * place) % 120 for place in range(length)] for length in lengths]
    together = core.vectors(documents)
    reversed_order = core.vectors(documents[::-1])[::-1]
    alone = [core.vectors([document])[0] for document in documents]
    for found in (reversed_order, alone):
        for one, other in zip(found, together, strict=True):
            assert max(abs(a - b) for a, b in zip(one, other, strict=True)) < 1e-4


@pytest.mark.advisory("CVE-2026-93592")
async def test_advisory_ids_out_of_range(stack: Stack) -> None:
    """CVE-2026-93592: a negative id passed the check and killed the engine."""
    for value in ([-1], [[-1]], [VOCAB_SIZE], [2**31], [2**63], [True], [1.0]):
        neighbour = asyncio.create_task(stack.post("/v1/embeddings", {"input": "QZX"}))
        answer = await stack.post("/v1/embeddings", {"input": value})
        assert (answer.status, answer.json()["error"]["param"]) == (400, "input")
        assert (await neighbour).json()["data"][0]["embedding"] == expected("QZX")
    assert (await stack.get("/health")).status == 200


@pytest.mark.advisory("CVE-2026-105755")
async def test_advisory_one_request_id_for_two(stack: Stack) -> None:
    """CVE-2026-105755: results were kept under the caller's X-Request-Id, and two queries got mixed."""
    bodies = [{"query": query, "documents": ["XQ", "W", "K"]} for query in ("QZX", "ZZ")]
    alone = [(await stack.post("/v1/rerank", body)).json()["results"] for body in bodies]
    headers = {"x-request-id": "same"}
    answers = await asyncio.gather(*(stack.post("/v1/rerank", body, headers) for body in bodies))
    assert [answer.json()["results"] for answer in answers] == alone
