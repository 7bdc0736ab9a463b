"""Rerank and score over a scripted engine: by vectors, and by a model that judges pairs."""

from __future__ import annotations

import math
from typing import Any

from catenary_testing.engine import score_of
from tests.support.gateway import Stack, script
from tests.support.pooling import EMBEDDINGS, TEXTS, cosine, refused, stack
from tests.support.stack_fixtures import StartStack

__all__ = ["stack"]


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
    # 0 cuts nothing.
    whole = (await stack.post("/v1/rerank", {**body, "max_tokens_per_doc": 0})).json()
    assert whole == {
        **(await stack.post("/v1/rerank", {**body, "max_tokens_per_doc": None})).json(),
        "id": whole["id"],
    }
    assert whole["usage"]["total_tokens"] == 7 + 2 + 3 + 3
    for bad in (-1, 1.5, "3"):
        await refused(stack, "/v1/rerank", {**body, "max_tokens_per_doc": bad}, "max_tokens_per_doc")


async def test_bad_rerank_requests(stack: Stack) -> None:
    changes: list[tuple[dict[str, Any], str]] = [
        ({"documents": []}, "documents"),
        ({"documents": "text"}, "documents"),
        ({"documents": ["a", 1]}, "documents.1"),
        ({"documents": [{"text": "a", "x": 1}]}, "documents.0"),
        ({"documents": [""]}, "documents.0"),
        ({"documents": ["a", "b", "", "c"]}, "documents.2"),
        ({"documents": ["a", {"text": ""}]}, "documents.1"),
        ({"documents": ["a", None]}, "documents.1"),
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
    unfit: list[tuple[dict[str, Any], str]] = [
        ({"text_1": ["a", "b"], "text_2": ["c"]}, "text_2"),
        ({"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_2"),
        ({"text_1": "a"}, "text_2"),
        ({}, "text_1"),
        ({"text_1": "a", "documents": "b"}, "text_2"),
        ({"text_1": "a", "text_2": []}, "text_2"),
        ({"text_1": 5, "text_2": "a"}, "text_1"),
        ({"text_1": "a", "text_2": "QX" * 50}, "text_2"),
    ]
    for body, param in unfit:
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
