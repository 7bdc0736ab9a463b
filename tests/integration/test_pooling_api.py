"""Embeddings, rerank and score over a scripted engine: exact numbers, shapes, refusals, leftovers."""

from __future__ import annotations

import asyncio
import base64
import math
import struct
from pathlib import Path
from typing import Any

import pytest

from catenary.v1 import common_pb2
from services.engine.scripted import Script, pack_vector, score_of, vector_of
from tests.support.engines import ScriptedEngine
from tests.support.gateway import CHAT, COMPLETIONS, MODEL, Stack, script, tokenizer_process
from tests.support.http import request_bytes
from tests.support.secrets import TestSecrets
from tests.support.stack_fixtures import StartStack
from tests.support.tiny_tokenizer import VOCAB_SIZE, byte_ids
from tests.support.waiting import eventually

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
    return await start_stack(
        embedding(), max_embedding_inputs=64, max_pairs=32, max_priority=300, document_window=3
    )


def vector(text: str, dimensions: int = 0) -> list[float]:
    """What the engine makes of a text, as float32."""
    packed = pack_vector(vector_of(byte_ids(text), WIDTH, dimensions))
    return list(struct.unpack(f"<{len(packed) // 4}f", packed))


def cosine(one: str, other: str) -> float:
    first, second = vector(one), vector(other)
    product = sum(a * b for a, b in zip(first, second, strict=True))
    return product / math.sqrt(sum(a * a for a in first)) / math.sqrt(sum(b * b for b in second))


async def embed(stack: Stack, value: Any, **fields: Any) -> Any:
    answer = await stack.post(EMBEDDINGS, {"input": value, **fields})
    assert answer.status == 200, answer.body
    return answer.json()


async def refused(
    stack: Stack, path: str, body: dict[str, Any], param: str | None, code: str | None = None
) -> str:
    answer = await stack.post(path, body)
    error = answer.json()["error"]
    assert (answer.status, error["param"]) == (400, param), error
    assert code is None or error["code"] == code
    return str(error["message"])


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
    for value in ("QZX", ids[0], ["QZX"], [ids[0]]):
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
    shapes = ("", [], [""], [[]], ["a", 1], [1, "a"], [[1], "a"], None, 5, {"a": 1}, [None], [[["a"]]])
    ids = ([-1], [[-1]], [VOCAB_SIZE], [[5], [VOCAB_SIZE]], [2**31], [[2**63]], [True], [[True]], [1.0])
    for value in (*shapes, *ids):
        await refused(stack, EMBEDDINGS, {"input": value}, "input")
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
    for fields, param in (
        ({"messages": chat, "input": "x"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role"),
        ({"messages": chat, "max_tokens": 5}, "max_tokens"),
        ({"messages": chat, "chat_template_kwargs": {"nobody": 1}}, "chat_template_kwargs.nobody"),
        ({"messages": chat, "continue_final_message": True, "add_generation_prompt": True}, None),
    ):
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


async def test_rerank_by_vectors(stack: Stack) -> None:
    body = {"query": "QZX", "documents": ["XQ", {"text": "QZX"}, "KKKKKK", "W"]}
    scores = {index: cosine("QZX", text) for index, text in enumerate(["XQ", "QZX", "KKKKKK", "W"])}
    order = sorted(scores, key=lambda index: -scores[index])
    assert order[0] == 1
    for path in ("/v1/rerank", "/rerank"):
        answer = (await stack.post(path, body)).json()
        assert [result["index"] for result in answer["results"]] == order
        for result in answer["results"]:
            assert math.isclose(result["relevance_score"], scores[result["index"]], abs_tol=1e-6)
        assert answer["results"][0]["document"] == {"text": "QZX"}
        # The query and the equal document are one text.
        assert answer["usage"]["total_tokens"] == sum(map(len, ["QZX", "XQ", "KKKKKK", "W"]))
        assert answer["id"].startswith("rerank-")
    for top, count in ((0, 4), (2, 2), (9, 4)):
        answer = (await stack.post("/v1/rerank", {**body, "top_n": top})).json()
        assert [result["index"] for result in answer["results"]] == order[:count]
    cohere = (await stack.post("/v2/rerank", body)).json()
    assert [set(result) for result in cohere["results"]] == [{"index", "relevance_score"}] * 4
    assert cohere["meta"]["tokens"] == {"input_tokens": 12}
    plain = (await stack.post("/v1/rerank", {**body, "return_documents": False})).json()
    assert "document" not in plain["results"][0]


async def test_long_documents_are_cut_for_a_ranking(stack: Stack) -> None:
    documents = ["QZXQQQQ", "XQ", "QZX", "QZW"]
    body = {"query": "QZXQQQQ", "documents": documents, "max_tokens_per_doc": 3}
    answer = (await stack.post("/v1/rerank", body)).json()
    scores = {index: cosine("QZXQQQQ", text[:3]) for index, text in enumerate(documents)}
    for result in answer["results"]:
        assert math.isclose(result["relevance_score"], scores[result["index"]], abs_tol=1e-6)
        assert result["document"]["text"] == documents[result["index"]]
    # The query is not cut, and the documents that are equal now count once.
    assert answer["usage"]["total_tokens"] == 7 + 3 + 2 + 3
    fits = (await stack.post("/v1/rerank", {**body, "documents": ["Q" * 100]})).json()
    assert fits["usage"]["total_tokens"] == 7 + 3
    for bad in (0, -1, 1.5, "3"):
        await refused(stack, "/v1/rerank", {**body, "max_tokens_per_doc": bad}, "max_tokens_per_doc")


async def test_bad_rerank_requests(stack: Stack) -> None:
    changes: list[tuple[dict[str, Any], str]] = [
        ({"documents": []}, "documents"),
        ({"documents": "text"}, "documents"),
        ({"documents": ["a", 1]}, "documents"),
        ({"documents": [{"text": "a", "x": 1}]}, "documents"),
        ({"documents": [""]}, "documents"),
        ({"query": ""}, "query"),
        ({"query": ["a"]}, "query"),
        ({"top_n": -1}, "top_n"),
        ({"top_n": 1.5}, "top_n"),
        ({"rank_fields": ["a"]}, "rank_fields"),
        ({"documents": ["QX" * 50]}, "documents"),
    ]
    for change, param in changes:
        await refused(stack, "/v1/rerank", {"query": "q", "documents": ["a"], **change}, param)


async def test_scores_by_vectors(stack: Stack) -> None:
    pairs = [("QZX", "XQ"), ("W", "KKKKKK")]
    for names in (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items")):
        body = dict(zip(names, map(list, zip(*pairs, strict=True)), strict=True))
        answer = (await stack.post("/v1/score", body)).json()
        assert [item["index"] for item in answer["data"]] == [0, 1]
        for item, pair in zip(answer["data"], pairs, strict=True):
            assert math.isclose(item["score"], cosine(*pair), abs_tol=1e-6)
    one = (await stack.post("/score", {"text_1": "QZX", "text_2": TEXTS})).json()
    assert len(one["data"]) == 4
    assert one["usage"]["prompt_tokens"] == sum(map(len, TEXTS))
    single = (await stack.post("/score", {"text_1": "QZX", "text_2": "W"})).json()
    assert math.isclose(single["data"][0]["score"], cosine("QZX", "W"), abs_tol=1e-6)
    bad = [
        ({"text_1": ["a", "b"], "text_2": ["c"]}, "text_2"),
        ({"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_2"),
        ({"text_1": "a"}, "text_2"),
        ({}, "text_1"),
        ({"text_1": "a", "documents": "b"}, "text_2"),
        ({"text_1": "a", "text_2": []}, "text_2"),
        ({"text_1": 5, "text_2": "a"}, "text_1"),
        ({"text_1": "a", "text_2": "QX" * 50}, "text_2"),
    ]
    for body, param in bad:
        await refused(stack, "/v1/score", body, param)


async def test_a_model_that_judges_pairs(start_stack: StartStack) -> None:
    stack = await start_stack(script(model={"task": "score"}))
    answer = (await stack.post("/v1/score", {"text_1": "QZX", "text_2": ["XQ", "W"]})).json()
    scores = [item["score"] for item in answer["data"]]
    assert len(set(scores)) == 2
    # The same pair scores the same, whoever is beside it and by whatever route.
    ranked = (await stack.post("/rerank", {"query": "QZX", "documents": ["W", "K", "XQ"]})).json()
    by_index = {result["index"]: result["relevance_score"] for result in ranked["results"]}
    assert [by_index[2], by_index[0]] == scores
    assert [result["relevance_score"] for result in ranked["results"]] == sorted(by_index.values())[::-1]
    await refused(stack, EMBEDDINGS, {"input": "x"}, "model", "unsupported_value")
    long = {"text_1": "Q", "text_2": "QX" * 600}
    text = await refused(stack, "/score", long, "text_2", "context_length_exceeded")
    assert "truncate_prompt_tokens" in text
    cut = await stack.post("/score", {**long, "truncate_prompt_tokens": 700})
    assert cut.json()["usage"]["prompt_tokens"] == 700
    # Of the pair's prompt so much is not the second text's to give.
    await refused(
        stack, "/score", {**long, "truncate_prompt_tokens": 20}, "text_2", "context_length_exceeded"
    )
    assert 0 < score_of([1]) < 1
    # A query goes with each of its documents: their pairs are not sent all at once.
    hostile = {"query": "Q" * 2_000_000, "documents": ["W"] * 1000}
    await refused(stack, "/rerank", hostile, "documents", "context_length_exceeded")


async def test_a_client_that_leaves_takes_its_documents_along(start_stack: StartStack) -> None:
    stack = await start_stack(embedding(step_delay_ms=50), document_window=5)
    connection = await stack.open_stream(EMBEDDINGS, {"input": ["QZX"] * 200})
    await eventually(lambda: len(stack.engine.app.hub._table) > 0, "a document in the engine")
    assert len(stack.engine.app.hub._table) <= 5
    connection.close()
    async with asyncio.timeout(2):
        await stack.idle()
    page = (await stack.get("/metrics")).body.decode()
    assert f'route="{EMBEDDINGS}",status="499"' in page


async def test_full_queues_slow_a_request_down(start_stack: StartStack) -> None:
    capacity = {"max_running": 2, "max_waiting": 1}
    stack = await start_stack(embedding(capacity=capacity, step_delay_ms=1))
    answer = await embed(stack, TEXTS * 8)
    assert [item["embedding"] for item in answer["data"]] == [vector(text) for text in TEXTS * 8]
    # Whoever has nothing in the queues is told to come back.
    full = common_pb2.Error(code=common_pb2.ERROR_CODE_OVERLOADED, message="No.", retry_after_ms=1000)
    stack.faults.refuse_next(full)
    refusal = await stack.post(EMBEDDINGS, {"input": "x"})
    assert (refusal.status, "retry-after" in refusal.headers) == (429, True)


async def test_keys_guard_these_routes_too(start_stack: StartStack) -> None:
    stack = await start_stack(embedding(), api_key=("secret",))
    for path in (EMBEDDINGS, "/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score"):
        connection = await stack.open_raw(request_bytes("POST", path, {"model": MODEL, "input": "x"}))
        assert (await connection.answer()).status == 401
        connection.close()


async def test_calls_go_to_the_tokenizer_that_has_the_model(start_stack: StartStack, run_dir: Path) -> None:
    directory = run_dir / "further"
    directory.mkdir()
    with tokenizer_process(directory, flags=("--served-model-name", "vectors")) as (target, _):
        stack = await start_stack(extra_tokenizers=(target,))
        engine = ScriptedEngine(
            [f"unix:{run_dir}/router.sock"],
            TestSecrets.write(run_dir),
            script=embedding(),
            served_model_name="vectors",
            listen=(f"unix:{run_dir}/e2.sock",),
        )
        await engine.start()
        try:
            board = stack.gateway.peers.models
            await eventually(
                lambda: len(board.served) == 2 and all(map(board._usable, board.served)),
                "two models",
                timeout_s=30,
            )
            for _ in range(4):
                answer = await stack.post(EMBEDDINGS, {"model": "vectors", "input": TEXTS})
                assert [item["embedding"] for item in answer.json()["data"]] == [
                    vector(text) for text in TEXTS
                ]
                assert (await stack.chat(max_tokens=2)).status == 200
            wrong = await stack.chat(model="vectors")
            assert wrong.json()["error"]["param"] == "model"
            missing = await stack.post("/tokenize", {"model": None, "prompt": "x"})
            assert "several are served" in missing.json()["error"]["message"]
        finally:
            await engine.stop()
