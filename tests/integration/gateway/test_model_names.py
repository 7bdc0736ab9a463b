"""Several names of one model."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.gateway import CHAT, COMPLETIONS, MODEL, Stack
from tests.support.stack_fixtures import StartStack

ALIASES = ("org/think", "llama3:8b", "m@v2", "two words")
PROMPT: dict[str, Any] = {"max_tokens": 2, "seed": 1}
CHATTED = {**PROMPT, "messages": [{"role": "user", "content": "x"}]}


async def aliased(start_stack: StartStack) -> Stack:
    return await start_stack(model_alias=tuple(f"{alias}={MODEL}" for alias in (*ALIASES, f"{MODEL}-2")))


async def test_every_name_is_listed_and_described(start_stack: StartStack) -> None:
    stack = await aliased(start_stack)
    cards = (await stack.get("/v1/models")).json()["data"]
    assert [card["id"] for card in cards] == [MODEL, *ALIASES, f"{MODEL}-2"]
    assert {card["root"] for card in cards} == {MODEL}
    for alias in ("org/think", "llama3:8b", "m@v2", "two%20words"):
        card = (await stack.get(f"/v1/models/{alias}")).json()
        assert card["id"] == alias.replace("%20", " ")
    assert (await stack.get("/v1/models/org")).status == 404


@pytest.mark.parametrize("name", [MODEL, *ALIASES])
async def test_answers_have_the_name_that_was_asked_for(start_stack: StartStack, name: str) -> None:
    stack = await aliased(start_stack)
    for path, body in (
        (COMPLETIONS, {**PROMPT, "prompt": "x"}),
        (CHAT, CHATTED),
        ("/v1/responses", {"input": "x", "max_output_tokens": 16}),
        ("/invocations", CHATTED),
    ):
        answer = await stack.post(path, {**body, "model": name})
        assert (answer.status, answer.json().get("model")) == (200, name), (path, answer.body)
    streamed = await stack.post(CHAT, {**CHATTED, "model": name, "stream": True})
    assert {event["model"] for event in streamed.events[:-1]} == {name}
    tokens = await stack.post("/tokenize", {"model": name, "prompt": "x"})
    assert tokens.status == 200
    text = await stack.post("/detokenize", {"model": name, "tokens": tokens.json()["tokens"]})
    assert text.json()["prompt"] == "x"
    page = (await stack.get("/metrics")).body.decode()
    assert f'catenary_request_success_total{{finished_reason="length",model_name="{MODEL}"}}' in page
    assert ALIASES[0] not in page


async def test_the_same_tokens_by_every_name(start_stack: StartStack) -> None:
    stack = await aliased(start_stack)
    texts = {
        (await stack.complete("x", **PROMPT, model=name)).json()["choices"][0]["text"]
        for name in (MODEL, *ALIASES)
    }
    assert len(texts) == 1


async def test_an_alias_of_a_model_that_is_not_served_is_unknown(start_stack: StartStack) -> None:
    stack = await start_stack(model_alias=("other=absent", f"{MODEL}=absent"))
    answer = await stack.complete("x", **PROMPT, model="other")
    assert (answer.status, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert (await stack.complete("x", **PROMPT)).status == 200
    assert [card["id"] for card in (await stack.get("/v1/models")).json()["data"]] == [MODEL]
