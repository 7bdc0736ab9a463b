"""Our answers are of OpenAI's published types: those of the openai package, which are generated from the
published document, read strictly; and the keys that the document requires although their value may be null.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, TypeVar

import pytest
import requests
from openai.types import (
    Batch,
    Completion,
    CreateEmbeddingResponse,
    FileDeleted,
    FileObject,
    Model,
)
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseItemList
from openai.types.shared import ErrorObject
from pydantic import BaseModel

from tests.support.batches import jsonl, line
from tests.support.gateway import CHAT, COMPLETIONS, MODEL, Stack, saying, script
from tests.support.http import Answer, call
from tests.support.responses import RESPONSES, events_of
from tests.support.stack_fixtures import StartStack
from tests.support.tiny_tokenizer import THINK_ID, byte_ids

T = TypeVar("T", bound=BaseModel)

TOOL = {"name": "look", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
TEXT = '<tool_call>\n{"name": "look", "arguments": {"city": "Paris"}}\n</tool_call>'
THOUGHT = [THINK_ID, *byte_ids("Hm.\n"), THINK_ID + 1, *byte_ids("\n\nI look.\n")]
BOTH = [*THOUGHT, *byte_ids(TEXT)]
USER = [{"role": "user", "content": "hi"}]

HEAD = {"id", "object", "created", "model", "choices"}
CHOICE = {"index", "finish_reason", "logprobs"}
RESPONSE = {
    *(
        "id",
        "object",
        "created_at",
        "error",
        "incomplete_details",
        "instructions",
        "model",
        "tools",
        "output",
    ),
    *("parallel_tool_calls", "metadata", "tool_choice", "temperature", "top_p"),
}
FILE = {"id", "object", "bytes", "created_at", "filename", "purpose", "status"}
BATCH = {"id", "object", "endpoint", "input_file_id", "completion_window", "status", "created_at"}


def strict(kind: type[T], value: Any, required: Iterable[str] = ()) -> T:
    """The value, read as a type without any conversion, with these keys in it."""
    assert set(required) <= value.keys(), set(required) - value.keys()
    return kind.model_validate_json(json.dumps(value), strict=True)


def good(answer: Answer) -> Any:
    assert answer.status == 200, answer.body
    return answer.json()


@pytest.fixture
async def calling(start_parsing: StartStack) -> Stack:
    """The model thinks, says something and calls a tool."""
    return await start_parsing(script(saying(BOTH)), router={"lease_ms": 20_000})


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"logprobs": True, "top_logprobs": 2, "n": 2},
        {"tools": [{"type": "function", "function": TOOL}]},
        {"service_tier": "flex", "max_tokens": 1},
    ],
)
async def test_chats(calling: Stack, fields: dict[str, Any]) -> None:
    value = good(await calling.post(CHAT, {"messages": USER, **fields}))
    strict(ChatCompletion, value, HEAD)
    for choice in value["choices"]:
        assert {*CHOICE, "message"} <= choice.keys()
        assert {"role", "content", "refusal"} <= choice["message"].keys()
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    *events, done = (await calling.post(CHAT, {"messages": USER, **fields, **usage})).events
    assert done == "[DONE]"
    for event in events:
        strict(ChatCompletionChunk, event, {*HEAD, "usage"})
        for choice in event["choices"]:
            assert {"index", "delta", "finish_reason"} <= choice.keys()
    assert events[-1]["choices"] == []


# Not echo with logprobs: the first token of a prompt has none, for which the document has no word.
@pytest.mark.parametrize(
    "fields", [{}, {"logprobs": 2}, {"echo": True}, {"n": 2, "best_of": 2}, {"prompt": ["a", "b"]}]
)
async def test_completions(calling: Stack, fields: dict[str, Any]) -> None:
    body = {"prompt": "hi", "max_tokens": 8, **fields}
    value = good(await calling.post(COMPLETIONS, body))
    strict(Completion, value, {*HEAD, "usage"})
    for choice in value["choices"]:
        assert {*CHOICE, "text"} <= choice.keys()
    *events, _ = (await calling.post(COMPLETIONS, {**body, "stream": True})).events
    for event in events:
        # The document has one type for both, in which a chunk before the last has no finish_reason yet.
        for choice in event["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        strict(Completion, event, HEAD)


async def test_responses(calling: Stack) -> None:
    body = {"input": "hi", "tools": [{"type": "function", **TOOL}], "max_output_tokens": 400}
    value = good(await calling.post(RESPONSES, body))
    assert {item["type"] for item in value["output"]} == {"reasoning", "message", "function_call"}
    strict(Response, value, RESPONSE)
    assert strict(Response, good(await calling.get(f"{RESPONSES}/{value['id']}")), RESPONSE)
    items = good(await calling.get(f"{RESPONSES}/{value['id']}/input_items"))
    strict(ResponseItemList, items, {"object", "data", "first_id", "last_id", "has_more"})
    streamed = await calling.post(RESPONSES, {**body, "stream": True})
    kinds = set()
    for event in events_of(streamed):
        if "response" in event:
            assert event["response"].keys() >= RESPONSE
        kinds.add(event["type"])
    assert len(kinds) == 13, kinds
    cut = good(await calling.post(RESPONSES, {"input": "hi", "max_output_tokens": 1}))
    assert strict(Response, cut, RESPONSE).status == "incomplete"


async def test_models(calling: Stack) -> None:
    listed = good(await calling.get("/v1/models"))
    assert listed.keys() == {"object", "data"}
    for model in [*listed["data"], good(await calling.get(f"/v1/models/{MODEL}"))]:
        strict(Model, model, {"id", "object", "created", "owned_by"})


async def test_embeddings(start_stack: StartStack) -> None:
    model = {"task": "embed", "embedding_width": 8, "max_model_len": 64}
    stack = await start_stack(script(model=model))
    value = good(await stack.post("/v1/embeddings", {"input": ["QZX", "W"]}))
    strict(CreateEmbeddingResponse, value, {"object", "model", "data", "usage"})


async def upload(stack: Stack) -> Answer:
    content = jsonl([line("a", {"prompt": "x"})])
    made = requests.Request(
        "POST", stack.address, data={"purpose": "batch"}, files={"file": ("in.jsonl", content)}
    ).prepare()
    assert isinstance(made.body, bytes)
    return await call(
        stack.address, "POST", "/v1/files", made.body, {"Content-Type": str(made.headers["content-type"])}
    )


async def test_files_and_batches(calling: Stack) -> None:
    file, other = [good(await upload(calling)) for _ in range(2)]
    strict(FileObject, file, FILE)
    strict(FileObject, good(await calling.get(f"/v1/files/{file['id']}")), FILE)
    body = {"input_file_id": file["id"], "endpoint": COMPLETIONS, "completion_window": "24h"}
    batch = good(await call(calling.address, "POST", "/v1/batches", body))
    strict(Batch, batch, BATCH)
    strict(Batch, good(await calling.get(f"/v1/batches/{batch['id']}")), BATCH)
    for page in (await calling.get("/v1/files"), await calling.get("/v1/batches")):
        assert good(page).keys() == {"object", "data", "first_id", "last_id", "has_more"}
    deleted = await call(calling.address, "DELETE", f"/v1/files/{other['id']}")
    strict(FileDeleted, good(deleted), {"id", "object", "deleted"})


async def test_errors(calling: Stack) -> None:
    for answer in (
        await calling.post(CHAT, {"messages": USER, "temperature": "x"}),
        await calling.post(CHAT, {"messages": USER, "model": "nope"}),
        await calling.get("/v1/files/nope"),
        await calling.get("/nope"),
        await call(calling.address, "DELETE", CHAT),
        await call(calling.address, "POST", CHAT, b"x", {"Content-Type": "text/plain"}),
    ):
        assert answer.status >= 400
        strict(ErrorObject, answer.json()["error"], {"message", "type", "param", "code"})
