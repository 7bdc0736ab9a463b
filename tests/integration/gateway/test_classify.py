"""Classes and raw answers over a scripted engine, and /invocations of every kind of request."""

from __future__ import annotations

import base64
import math
import struct
from typing import Any

import openai
import pytest

from catenary_testing.engine import classes_of, pack_vector, score_of, vector_of
from tests.support.batches import ended, line, results, started
from tests.support.gateway import CHAT, COMPLETIONS, MODEL, Stack, saying, script
from tests.support.pooling import EMBEDDINGS, LONGEST, TEXTS, WIDTH, embedding, refused, vector
from tests.support.stack_fixtures import StartStack
from tests.support.tiny_tokenizer import VOCAB_SIZE, byte_ids

LABELS = ("bad", "so so", "good")
CLASSIFY, POOLING, INVOCATIONS = "/classify", "/pooling", "/invocations"
USER = {"role": "user", "content": "hi"}


def classes(text: str, *, raw: bool = False) -> list[float]:
    """What the engine makes of a text, as float32."""
    return list(struct.unpack("<3f", pack_vector(classes_of(byte_ids(text), len(LABELS), raw=raw))))


@pytest.fixture
async def classifier(start_stack: StartStack) -> Stack:
    """A gateway of a model that classifies."""
    model = {"task": "classify", "labels": LABELS, "max_model_len": LONGEST}
    return await start_stack(script(model=model), max_embedding_inputs=64, max_priority=300)


@pytest.fixture
async def scorer(start_stack: StartStack) -> Stack:
    """A gateway of a model that scores pairs."""
    return await start_stack(script(model={"task": "score"}))


async def answered(stack: Stack, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request that is taken, but for what differs between any two."""
    answer = await stack.post(path, body)
    assert answer.status == 200, (path, answer.body)
    found: dict[str, Any] = answer.json()
    return {name: value for name, value in found.items() if name not in ("id", "created")}


@pytest.mark.parametrize("path", [CLASSIFY, "/v1/classify"])
async def test_classes_of_every_form_of_input(classifier: Stack, path: str) -> None:
    ids = [byte_ids(text) for text in TEXTS]
    for value in (TEXTS, ids):
        answer = (await classifier.post(path, {"input": value})).json()
        assert answer["id"].startswith("classify-")
        assert (answer["object"], answer["model"]) == ("list", MODEL)
        tokens = sum(map(len, ids))
        assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
        for index, (item, text) in enumerate(zip(answer["data"], TEXTS, strict=True)):
            probs = classes(text)
            label = LABELS[probs.index(max(probs))]
            assert item == {"index": index, "label": label, "probs": probs, "num_classes": 3}
    assert len({item["label"] for item in answer["data"]}) > 1
    for one in ("QZX", ids[0]):
        assert (await answered(classifier, path, {"input": one}))["data"][0]["probs"] == classes("QZX")


async def test_a_chat_is_classified_as_its_template_says(classifier: Stack) -> None:
    rendered = (
        await classifier.post("/tokenize", {"messages": [USER], "add_generation_prompt": False})
    ).json()
    (item,) = (await answered(classifier, CLASSIFY, {"messages": [USER]}))["data"]
    expected = struct.unpack("<3f", pack_vector(classes_of(rendered["tokens"], 3)))
    assert item["probs"] == list(expected)
    both = {"messages": [USER], "input": "x"}
    await refused(classifier, CLASSIFY, both, "messages")
    await refused(classifier, CLASSIFY, {"messages": [{"role": "user"}]}, "messages.0.content")


async def test_logits_in_place_of_probabilities(classifier: Stack) -> None:
    for switch, raw in ((False, True), (True, False), (None, False)):
        answer = await answered(classifier, CLASSIFY, {"input": "QZX", "use_activation": switch})
        assert answer["data"][0]["probs"] == classes("QZX", raw=raw)
    await refused(classifier, CLASSIFY, {"input": "x", "use_activation": "no"}, "use_activation")
    await refused(classifier, CLASSIFY, {"input": "x", "softmax": False}, "softmax", "unsupported_parameter")


async def test_a_model_that_scores_has_one_class_without_a_name(scorer: Stack) -> None:
    (item,) = (await answered(scorer, CLASSIFY, {"input": "QZX"}))["data"]
    assert item == {"index": 0, "label": None, "probs": [score_of(byte_ids("QZX"))], "num_classes": 1}
    (pooled,) = (await answered(scorer, POOLING, {"input": "QZX", "task": "score"}))["data"]
    assert pooled["data"] == item["probs"]


async def test_bad_requests_of_classes(classifier: Stack) -> None:
    bad: list[tuple[dict[str, Any], str]] = [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input.1"),
        ({"input": ["a", 1]}, "input.1"),
        ({"input": [[-1]]}, "input"),
        ({"input": [VOCAB_SIZE]}, "input"),
        ({"input": ["x"] * 65}, "input"),
        ({"input": "QX" * 50}, "input"),
        ({"input": "x", "dimensions": 2}, "dimensions"),
        ({"input": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "x", "truncate_prompt_tokens": LONGEST + 1}, "truncate_prompt_tokens"),
        ({"input": "x", "priority": 301}, "priority"),
        ({"input": "x", "truncation_side": "left"}, "truncation_side"),
        ({"input": "x", "frobnicate": 1}, "frobnicate"),
    ]
    for body, param in bad:
        answer = await classifier.post(CLASSIFY, body)
        error = answer.json()["error"]
        assert answer.status == 400, (body, error)
        assert str(error["param"]).startswith(param.split(".")[0]), (body, error)
    cut = await answered(classifier, CLASSIFY, {"input": "QX" * 50, "truncate_prompt_tokens": 5})
    assert cut["data"][0]["probs"] == classes("QXQXQ")
    assert (await classifier.post(CLASSIFY, {"input": "x", "truncation_side": "right"})).status == 200
    assert (await classifier.post(CLASSIFY, {"input": "x", "model": "none"})).status == 404


async def test_a_route_of_another_task_names_the_one_to_take(classifier: Stack) -> None:
    other: list[tuple[str, dict[str, Any]]] = [
        (EMBEDDINGS, {"input": "x"}),
        ("/v1/rerank", {"query": "x", "documents": ["y"]}),
        ("/v1/score", {"text_1": "x", "text_2": "y"}),
        (CHAT, {"messages": [USER]}),
    ]
    for path, body in other:
        assert "/classify" in await refused(classifier, path, body, "model", "unsupported_value")


async def test_a_model_that_generates_does_not_classify(start_stack: StartStack) -> None:
    stack = await start_stack(script(saying("x")))
    for path in (CLASSIFY, POOLING, EMBEDDINGS):
        assert CHAT in await refused(stack, path, {"input": "x"}, "model", "unsupported_value")


@pytest.mark.parametrize("path", [POOLING, "/v1/pooling"])
async def test_pooling_of_a_model_that_embeds(start_stack: StartStack, path: str) -> None:
    stack = await start_stack(embedding())
    answer = (await stack.post(path, {"input": TEXTS})).json()
    assert answer["id"].startswith("pool-")
    assert answer["data"] == [
        {"index": index, "object": "pooling", "data": vector(text)} for index, text in enumerate(TEXTS)
    ]
    assert answer["usage"]["total_tokens"] == sum(map(len, TEXTS))
    for name in ("embed", None):
        body = {"input": "QZX", "task": name, "dimensions": 4}
        assert (await answered(stack, path, body))["data"][0]["data"] == vector("QZX", 4)
    assert EMBEDDINGS in await refused(stack, CLASSIFY, {"input": "x"}, "model", "unsupported_value")
    raw = list(map(float, vector_of(byte_ids("QZX"), WIDTH, raw=True)))
    body = {"input": "QZX", "use_activation": False}
    assert (await answered(stack, path, body))["data"][0]["data"] == raw
    assert (await answered(stack, EMBEDDINGS, body))["data"][0]["embedding"] == raw
    encoded = (await answered(stack, path, {**body, "encoding_format": "base64"}))["data"][0]["data"]
    assert base64.b64decode(encoded) == pack_vector(raw)


async def test_bad_requests_of_pooling(classifier: Stack) -> None:
    pooled = await answered(classifier, POOLING, {"input": TEXTS, "task": "classify"})
    assert [item["data"] for item in pooled["data"]] == [classes(text) for text in TEXTS]
    for task in ("token_embed", "token_classify"):
        text = await refused(classifier, POOLING, {"input": "x", "task": task}, "task", "unsupported_value")
        assert "each token" in text
    bad: list[tuple[dict[str, Any], str]] = [
        ({"task": "embed"}, "task"),
        ({"task": "plugin"}, "task"),
        ({"task": 5}, "task"),
        ({"dimensions": 2}, "dimensions"),
        ({"encoding_format": "bytes"}, "encoding_format"),
        ({"normalize": False}, "normalize"),
        ({"data": {}}, "data"),
    ]
    for fields, param in bad:
        await refused(classifier, POOLING, {"input": "x", **fields}, param)


PAIR = {"text_1": "QZX", "text_2": "W"}
RANKED = {"query": "QZX", "documents": ["W"], "use_activation": False}


async def test_scores_without_their_last_step(scorer: Stack) -> None:
    (item,) = (await answered(scorer, "/v1/score", {**PAIR, "use_activation": False}))["data"]
    (score,) = (await answered(scorer, "/v1/score", PAIR))["data"]
    assert item["score"] == pytest.approx(math.log(score["score"] / (1 - score["score"])), abs=1e-6)
    assert (await answered(scorer, "/rerank", RANKED))["results"][0]["relevance_score"] == item["score"]


async def test_cosines_have_no_last_step(start_stack: StartStack) -> None:
    stack = await start_stack(embedding())
    text = await refused(stack, "/v1/score", {**PAIR, "use_activation": False}, "use_activation")
    assert "cosines" in text
    await refused(stack, "/v1/rerank", RANKED, "use_activation", "unsupported_value")


async def test_a_batch_of_classes(classifier: Stack) -> None:
    async with openai.AsyncOpenAI(base_url=f"{classifier.address}/v1", api_key="k", max_retries=0) as client:
        url = "/v1/classify"
        lines = [line(text, {"input": text}, url) for text in TEXTS]
        batch = await ended(client, await started(client, lines, url))
        told = await results(client, batch.output_file_id)
        assert {name: item["response"]["body"]["data"][0]["probs"] for name, item in told.items()} == {
            text: classes(text) for text in TEXTS
        }


async def test_invocations_of_a_model_that_classifies(classifier: Stack) -> None:
    chat = {"messages": [USER]}
    for path, body in ((CLASSIFY, {"input": TEXTS}), (CLASSIFY, chat)):
        assert await answered(classifier, INVOCATIONS, body) == await answered(classifier, path, body)
    for pooled in ({"input": "x", "task": "classify"}, {**chat, "task": "classify"}):
        assert await answered(classifier, INVOCATIONS, pooled) == await answered(classifier, POOLING, pooled)
    for other in ({"prompt": "x"}, {"query": "x", "documents": ["y"]}, {"text_1": "x", "text_2": "y"}):
        assert "/classify" in await refused(classifier, INVOCATIONS, other, "model")


async def test_invocations_of_a_model_that_embeds(start_stack: StartStack) -> None:
    stack = await start_stack(embedding())
    for path, body in (
        (EMBEDDINGS, {"input": TEXTS, "encoding_format": "base64"}),
        (EMBEDDINGS, {"messages": [USER], "input": None}),
        (POOLING, {"input": "x", "task": "embed"}),
        ("/v1/rerank", {"query": "QZX", "documents": TEXTS}),
        ("/v1/score", {"text_1": "QZX", "text_2": TEXTS}),
        ("/v1/score", {"queries": "QZX", "documents": TEXTS}),
        ("/v1/score", {"data_1": TEXTS, "data_2": TEXTS}),
    ):
        assert await answered(stack, INVOCATIONS, body) == await answered(stack, path, body), body
    bad: list[tuple[dict[str, Any], str]] = [
        ({}, "messages"),
        ({"documents": ["x"]}, "query"),
        ({"text_2": "x"}, "text_1"),
        ({"input": "x", "text_1": "x"}, "input"),
        ({"query": "x", "documents": ["x"], "input": "x"}, "input"),
        ({"queries": ["x"], "query": "x", "documents": ["y"]}, "query"),
        ({"input": None}, "messages"),
        ({"input": "x", "stream": True}, "stream"),
        ({"input": "x", "model": 5}, "model"),
        ({"messages": [USER], "model": ["a"]}, "model"),
    ]
    for body, param in bad:
        await refused(stack, INVOCATIONS, body, param)
    assert (await stack.post(INVOCATIONS, {"input": "x", "model": "none"})).status == 404


async def test_invocations_of_a_model_that_generates(start_stack: StartStack) -> None:
    stack = await start_stack(script(saying("yes")))
    assert "'prompt'" in await refused(stack, INVOCATIONS, {"input": "x"}, "input", "unsupported_value")
    # A template's documents belong to the chat; they are no ranking's.
    chatted = {"messages": [USER], "max_tokens": 2, "documents": [{"text": "a"}]}
    answer, direct = await stack.post(INVOCATIONS, chatted), await stack.post(CHAT, chatted)
    assert (answer.status, answer.json()) == (direct.status, direct.json())
    for path, body in ((CHAT, {"messages": [USER]}), (COMPLETIONS, {"prompt": "x"})):
        assert await answered(stack, INVOCATIONS, body) == await answered(stack, path, body)


async def test_invocations_of_a_model_that_scores(scorer: Stack) -> None:
    body = {"query": "QZX", "documents": TEXTS}
    assert await answered(scorer, INVOCATIONS, body) == await answered(scorer, "/v1/rerank", body)
    assert await answered(scorer, INVOCATIONS, {"input": "x"}) == await answered(
        scorer, CLASSIFY, {"input": "x"}
    )
