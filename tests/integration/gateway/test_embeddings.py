"""Embeddings over a scripted engine: exact numbers, shapes, limits, refusals."""

from __future__ import annotations

import base64
import math
import struct
from typing import Any

from catenary_testing.engine import pack_vector, vector_of
from tests.support.gateway import CHAT, COMPLETIONS, MODEL, Stack
from tests.support.pooling import EMBEDDINGS, LONGEST, TEXTS, WIDTH, embed, refused, stack, vector
from tests.support.tiny_tokenizer import VOCAB_SIZE, byte_ids

__all__ = ["stack"]


async def test_every_form_of_input(stack: Stack) -> None:
    ids = [byte_ids(text) for text in TEXTS]
    expected = [vector(text) for text in TEXTS]
    for value in (TEXTS, ids):
        answer = await embed(stack, value)
        assert [item["embedding"] for item in answer["data"]] == expected
        assert [(item["index"], item["object"]) for item in answer["data"]] == [
            (index, "embedding") for index in range(4)
        ]
        tokens = sum(map(len, ids))
        assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
        assert (answer["object"], answer["model"]) == ("list", MODEL)
    alone: list[Any] = ["QZX", ids[0], ["QZX"], [ids[0]]]
    for value in alone:
        assert (await embed(stack, value))["data"][0]["embedding"] == expected[0]


async def test_base64_is_the_same_to_the_bit(stack: Stack) -> None:
    encoded = await embed(stack, TEXTS, encoding_format="base64")
    for text, item in zip(TEXTS, encoded["data"], strict=True):
        assert base64.b64decode(item["embedding"]) == pack_vector(vector(text))


async def test_dimensions(stack: Stack) -> None:
    for width in (4, 8, WIDTH):
        found = (await embed(stack, "QZX", dimensions=width))["data"][0]["embedding"]
        assert found == vector("QZX", width % WIDTH)
        assert math.isclose(sum(number * number for number in found), 1, abs_tol=1e-5)
    for wrong in (0, -1, 3, WIDTH + 1, 2**31):
        await refused(stack, EMBEDDINGS, {"input": "x", "dimensions": wrong}, "dimensions")
    text = await refused(stack, EMBEDDINGS, {"input": "x", "dimensions": 5}, "dimensions")
    assert "4, 8, 12" in text


async def test_truncation(stack: Stack) -> None:
    long = "QX" * 50
    text = await refused(stack, EMBEDDINGS, {"input": ["Q", long]}, "input", "context_length_exceeded")
    assert "100 tokens" in text
    assert "truncate_prompt_tokens" in text
    await refused(stack, EMBEDDINGS, {"input": [byte_ids(long)]}, "input", "context_length_exceeded")
    for value in (long, byte_ids(long)):
        for keep, left in ((5, 5), (-1, LONGEST), (LONGEST, LONGEST)):
            answer = await embed(stack, value, truncate_prompt_tokens=keep)
            assert answer["usage"]["prompt_tokens"] == left
            assert answer["data"][0]["embedding"] == vector(long[:left])
    for wrong in (0, -2, LONGEST + 1, 2**40):
        param = "truncate_prompt_tokens"
        await refused(stack, EMBEDDINGS, {"input": "x", param: wrong}, param)


async def test_bad_input_is_refused_and_harms_nobody(stack: Stack) -> None:
    shapes: tuple[Any, ...] = ("", [], ["a", 1], [1, "a"], [[1], "a"], None, 5, {"a": 1}, [None], [[["a"]]])
    ids = ([-1], [[-1]], [VOCAB_SIZE], [[5], [VOCAB_SIZE]], [2**31], [[2**63]], [True], [[True]], [1.0])
    for value in (*shapes, *ids):
        await refused(stack, EMBEDDINGS, {"input": value}, "input")
    for empty, place in (([""], 0), ([[]], 0), (["a", "b", ""], 2), ([[5], []], 1)):
        await refused(stack, EMBEDDINGS, {"input": empty}, f"input.{place}")
    infinite = await stack.post(EMBEDDINGS, b'{"model": "tiny", "input": [1e400]}')
    assert infinite.status == 400
    assert (await embed(stack, "QZX"))["data"][0]["embedding"] == vector("QZX")


async def test_limits_say_their_value(stack: Stack) -> None:
    assert "64" in await refused(stack, EMBEDDINGS, {"input": ["x"] * 65}, "input")
    assert len((await embed(stack, ["Q"] * 64))["data"]) == 64
    documents = {"query": "x", "documents": ["x"] * 33}
    assert "32" in await refused(stack, "/rerank", documents, "documents")
    for name, value in (
        ("normalize", False),
        ("cache_salt", "x"),
    ):
        await refused(stack, EMBEDDINGS, {"input": "x", name: value}, name, "unsupported_parameter")
    await embed(stack, "x", priority=300)
    assert "300" in await refused(stack, EMBEDDINGS, {"input": "x", "priority": 301}, "priority")
    await refused(stack, EMBEDDINGS, {"input": "x", "sound": 1}, "sound", "unknown_parameter")
    await refused(stack, EMBEDDINGS, {"input": "x", "encoding_format": "hex"}, "encoding_format")


async def test_a_chat_becomes_one_vector(stack: Stack) -> None:
    chat: list[Any] = [{"role": "system", "content": "Q"}, {"role": "user", "content": "ZX"}]
    for fields in ({}, {"add_generation_prompt": False}, {"add_generation_prompt": True}):
        rendered = await stack.post("/tokenize", {"messages": chat, "add_generation_prompt": False, **fields})
        ids = rendered.json()["tokens"]
        answer = await stack.post(EMBEDDINGS, {"messages": chat, **fields})
        assert answer.status == 200, answer.body
        packed = pack_vector(vector_of(ids, WIDTH, 0))
        (found,) = answer.json()["data"]
        assert found["embedding"] == list(struct.unpack(f"<{WIDTH}f", packed))
        assert answer.json()["usage"]["prompt_tokens"] == len(ids)
    narrow = await stack.post(EMBEDDINGS, {"messages": chat, "dimensions": 4, "encoding_format": "base64"})
    assert len(base64.b64decode(narrow.json()["data"][0]["embedding"])) == 16
    long = [{"role": "user", "content": "Q" * 100}]
    await refused(stack, EMBEDDINGS, {"messages": long}, "messages", "context_length_exceeded")
    cut = await stack.post(EMBEDDINGS, {"messages": long, "truncate_prompt_tokens": 20})
    assert cut.json()["usage"]["prompt_tokens"] == 20
    bad: list[tuple[dict[str, Any], str | None]] = [
        ({"messages": chat, "input": "x"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
        ({"messages": chat, "max_tokens": 5}, "max_tokens"),
        ({"messages": chat, "chat_template_kwargs": {"nobody": 1}}, "chat_template_kwargs.nobody"),
        ({"messages": chat, "continue_final_message": True, "add_generation_prompt": True}, None),
    ]
    for fields, param in bad:
        await refused(stack, EMBEDDINGS, fields, param or "continue_final_message")


async def test_models_for_other_tasks_say_so(stack: Stack) -> None:
    assert "/v1/embeddings" in await refused(
        stack, CHAT, {"messages": [{"role": "user", "content": "hi"}]}, "model", "unsupported_value"
    )
    await refused(stack, COMPLETIONS, {"prompt": "hi"}, "model", "unsupported_value")
    listed = (await stack.get(f"/v1/models/{MODEL}")).json()
    assert listed["tasks"] == ["embed"]
    unknown = await stack.post(EMBEDDINGS, {"model": "nope", "input": "x"})
    assert (unknown.status, unknown.json()["error"]["code"]) == (404, "model_not_found")
