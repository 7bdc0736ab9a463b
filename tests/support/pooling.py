"""A gateway over a scripted model of embeddings, and what it should answer."""

from __future__ import annotations

import math
import struct
from typing import Any

import pytest

from catenary_testing.engine import Script, pack_vector, vector_of
from tests.support.gateway import Stack, script
from tests.support.stack_fixtures import StartStack
from tests.support.tiny_tokenizer import byte_ids

EMBEDDINGS = "/v1/embeddings"
WIDTH = 12
LONGEST = 64
# Capitals in a row: each is one token.
TEXTS = ["QZX", "XQ", "KKKKKK", "W"]


def embedding(**fields: Any) -> Script:
    """A script of an embedding model."""
    return script(
        model={
            "task": "embed",
            "embedding_width": WIDTH,
            "embedding_dimensions": (4, 8),
            "max_model_len": LONGEST,
        },
        **fields,
    )


@pytest.fixture
async def stack(start_stack: StartStack) -> Stack:
    """A gateway of a model of embeddings, with limits that tests reach."""
    return await start_stack(
        embedding(), max_embedding_inputs=64, max_pairs=32, max_priority=300, document_window=3
    )


def vector(text: str, dimensions: int = 0) -> list[float]:
    """What the engine makes of a text, as float32."""
    packed = pack_vector(vector_of(byte_ids(text), WIDTH, dimensions))
    return list(struct.unpack(f"<{len(packed) // 4}f", packed))


def cosine(one: str, other: str) -> float:
    """What two texts score by their vectors."""
    first, second = vector(one), vector(other)
    product = sum(a * b for a, b in zip(first, second, strict=True))
    return product / math.sqrt(sum(a * a for a in first)) / math.sqrt(sum(b * b for b in second))


async def embed(stack: Stack, value: Any, **fields: Any) -> Any:
    """The answer to an input that is taken."""
    answer = await stack.post(EMBEDDINGS, {"input": value, **fields})
    assert answer.status == 200, answer.body
    return answer.json()


async def refused(
    stack: Stack, path: str, body: dict[str, Any], param: str | None, code: str | None = None
) -> str:
    """The message of a request that is refused for this parameter."""
    answer = await stack.post(path, body)
    error = answer.json()["error"]
    assert (answer.status, error["param"]) == (400, param), error
    assert code is None or error["code"] == code
    return str(error["message"])
