"""The Python clients of the gRPC side, with the real small model."""

from __future__ import annotations

from typing import Any

import pytest

from catenary import AsyncClient, Client
from catenary.rpc import RpcError
from catenary.v1 import common_pb2
from tests.e2e.conftest import EMBEDDER, MODEL
from tests.support.e2e_stack import ProcessStack

QUESTION = [{"role": "user", "content": "Name the capital of France."}]


async def test_chats_and_texts(stack: ProcessStack):
    async with stack.client() as client:
        answer = await client.chat(QUESTION, model=MODEL, temperature=0, max_tokens=32)
        assert "Paris" in answer.text
        assert answer.finish_reason == "stop"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == len(answer.token_ids)
        pieces = [
            delta async for delta in client.stream_chat(QUESTION, model=MODEL, temperature=0, max_tokens=32)
        ]
        assert "".join(piece.text for piece in pieces) == answer.text
        assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
        last = pieces[-1].usage
        assert last is not None
        assert last.completion_tokens == answer.usage.completion_tokens
        ids = await client.tokenize("The capital of France is", model=MODEL)
        whole = await client.complete("The capital of France is", model=MODEL, temperature=0, max_tokens=4)
        assert whole.text == await client.detokenize(whole.token_ids, model=MODEL)
        assert whole.text == (await client.complete(ids, model=MODEL, temperature=0, max_tokens=4)).text
        assert whole.finish_reason == "length"


async def test_stop_strings(stack: ProcessStack):
    async with stack.client() as client:
        asked: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 32}
        whole = await client.chat(QUESTION, **asked)
        begin, _, _ = whole.text.partition("Paris")
        cut = await client.chat(QUESTION, stop="Paris", **asked)
        assert (cut.text, cut.finish_reason) == (begin, "stop")
        assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
        assert (cut.usage.prompt_tokens, cut.usage.completion_tokens) == (
            *(whole.usage.prompt_tokens, len(cut.token_ids)),
        )
        stream = client.stream_chat(QUESTION, stop=["no such text", "Paris"], **asked)
        assert "".join([delta.text async for delta in stream]) == begin
        rest = await client.complete("The capital of France is", stop=["\u4e16"], **asked)
        assert rest.text == (await client.complete("The capital of France is", **asked)).text
        with pytest.raises(ValueError, match="empty"):
            await client.complete("x", stop="", **asked)


async def test_leaving_a_stream_aborts_it(stack: ProcessStack):
    async with stack.client() as client:
        stream = client.stream_complete("Count:", model=MODEL, ignore_eos=True, max_tokens=1500)
        await anext(stream)
        # The fixture waits until nothing is left of it.
        await stream.aclose()


async def test_vectors(stack: ProcessStack):
    async with stack.client() as client:
        documents = [[101, 7000 + number, 102] for number in range(40)]
        vectors = await client.embed(documents, model=EMBEDDER)
        alone = await client.embed(documents[:1], model=EMBEDDER)
    assert {len(vector) for vector in vectors} == {384}
    assert [sum(x * x for x in vector) for vector in vectors] == pytest.approx([1.0] * 40)
    assert vectors[0] == pytest.approx(alone[0], abs=1e-6)


async def test_refusals_name_what_is_wrong(stack: ProcessStack):
    async with stack.client() as client:
        with pytest.raises(RpcError) as refused:
            await client.complete("x", model=MODEL, allowed_token_ids=[10**6])
        assert refused.value.error.param == "allowed_token_ids"
        with pytest.raises(RpcError) as unknown:
            await client.chat(QUESTION, model="nope")
        assert unknown.value.error.code == common_pb2.ERROR_CODE_MODEL_NOT_FOUND
        with pytest.raises(RpcError) as pooled:
            await client.embed(["x"], model=MODEL)
        assert not pooled.value.error.retryable
    async with AsyncClient(stack.socket("router"), secret=stack.secrets.client) as blind:
        with pytest.raises(ValueError, match="without a tokenizer"):
            await blind.chat(QUESTION, model=MODEL)


def test_a_client_without_a_loop(real_processes: ProcessStack):
    addresses: dict[str, Any] = {
        "tokenizer": real_processes.socket("tokenizer"),
        "secret": real_processes.secrets.client,
    }
    with Client(real_processes.socket("router"), **addresses) as client:
        assert MODEL in [model.info.name for model in client.models()]
        answer = client.chat(QUESTION, model=MODEL, temperature=0, max_tokens=32)
        pieces = list(client.stream_chat(QUESTION, model=MODEL, temperature=0, max_tokens=32))
        assert "".join(piece.text for piece in pieces) == answer.text
        for piece in client.stream_complete("Count:", model=MODEL, ignore_eos=True, max_tokens=1500):
            assert piece.token_ids
            break
    with pytest.raises(RuntimeError, match="closed"):
        client.models()
