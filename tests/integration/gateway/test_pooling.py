"""Documents over a scripted engine: who leaves, full queues, keys, and a model beside others."""

from __future__ import annotations

import asyncio
from pathlib import Path

from catenary.v1 import common_pb2
from gateway.routing import limited_paths
from tests.support.engines import ScriptedEngine
from tests.support.gateway import MODEL, tokenizer_process
from tests.support.http import call, request_bytes
from tests.support.pooling import EMBEDDINGS, TEXTS, embed, embedding, vector
from tests.support.secrets import TestSecrets
from tests.support.stack_fixtures import StartStack
from tests.support.waiting import eventually


async def test_a_client_that_leaves_takes_its_documents_along(start_stack: StartStack) -> None:
    stack = await start_stack(embedding(step_delay_ms=50), document_window=5)
    connection = await stack.open_stream(EMBEDDINGS, {"input": ["QZX"] * 200})
    await eventually(lambda: stack.engine.app.frontend.live_sequences > 0, "a document in the engine")
    assert stack.engine.app.frontend.live_sequences <= 5
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
    further = ("/classify", "/v1/classify", "/pooling", "/v1/pooling", "/invocations")
    for path in (EMBEDDINGS, "/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score", *further):
        assert path in limited_paths(stack.gateway.routers)
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
            board = stack.gateway.upstreams.models
            await eventually(
                lambda: len(board.names) == 2,
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
            for path in (EMBEDDINGS, "/v1/chat/completions", "/v1/responses", "/rerank", "/tokenize"):
                for body in ({}, {"model": None}, {"model": ""}):
                    missing = await call(stack.address, "POST", path, body)
                    error = missing.json()["error"]
                    assert (missing.status, error["param"], error["code"]) == (
                        *(400, "model", "missing_required_parameter"),
                    )
                    assert "several are served" in error["message"]
        finally:
            await engine.stop()
