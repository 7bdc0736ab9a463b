"""`/v1/files` and `/v1/batches` as the reference client sees them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch, FileObject

from tests.support.batches import CHAT, COMPLETIONS, ended, jsonl, line, results, started
from tests.support.gateway import MODEL, Stack, saying, script
from tests.support.http import call
from tests.support.responses import RESPONSES
from tests.support.stack_fixtures import StartStack
from tests.support.waiting import eventually


@asynccontextmanager
async def client_of(stack: Stack, key: str = "k") -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{stack.address}/v1", api_key=key, max_retries=0) as client:
        yield client


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client of a gateway without rules."""
    async with client_of(stack) as client:
        yield client


@pytest.mark.advisory("CVE-2026-7302")
async def test_files(client: openai.AsyncOpenAI) -> None:
    data = jsonl([line("a", {"prompt": "x"})])
    made = await client.files.create(file=("../../dir/my file.jsonl", data), purpose="batch")
    assert (made.bytes, made.filename, made.purpose) == (len(data), "my file.jsonl", "batch")
    other = await client.files.create(
        file=("b", b"y" * 1_000_000), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert other.expires_at == pytest.approx(other.created_at + 3600, abs=1)
    assert (await client.files.content(other.id)).content == b"y" * 1_000_000
    assert await client.files.retrieve(made.id) == made
    assert [file.id async for file in client.files.list(limit=1)] == [other.id, made.id]
    assert [file.id async for file in client.files.list(order="asc", purpose="batch")] == [made.id, other.id]
    assert (await client.files.delete(made.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await client.files.content(made.id)


async def test_a_batch_of_each_endpoint(start_stack: StartStack) -> None:
    stack = await start_stack(batch_model_wait_s=0.5)
    async with client_of(stack) as client:
        await each_endpoint(client, stack)


async def each_endpoint(client: openai.AsyncOpenAI, stack: Stack) -> None:
    bodies: dict[str, dict[str, Any]] = {
        COMPLETIONS: {"prompt": "x", "max_tokens": 3, "seed": 1},
        CHAT: {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "seed": 1},
        RESPONSES: {"input": "x", "max_output_tokens": 3, "seed": 1},
    }
    for url, body in bodies.items():
        lines = [line(f"n{index}", body, url) for index in range(5)]
        lines.append(line("bad", {**body, "temperature": 9}, url))
        lines.append(line("model", {**body, "model": "nope"}, url))
        lines.append(line("stream", {**body, "stream": True}, url))
        batch = await ended(client, await started(client, lines, url))
        assert batch.status == "completed"
        counts = batch.request_counts
        assert counts is not None
        assert (counts.total, counts.completed, counts.failed) == (8, 5, 3)
        good = await results(client, batch.output_file_id)
        bad = await results(client, batch.error_file_id)
        assert sorted(good) == [f"n{index}" for index in range(5)]
        assert {name: item["response"]["body"]["error"]["param"] for name, item in bad.items()} == {
            "bad": "temperature",
            "model": "model",
            "stream": "stream",
        }
        assert bad["model"]["response"]["status_code"] == 404
        direct = (await stack.post(url, body)).json()
        for item in good.values():
            assert item["id"].startswith("batch_req_")
            assert item["error"] is None
            answer = item["response"]["body"]
            assert item["response"]["status_code"] == 200
            field = "output" if url == RESPONSES else "choices"
            assert without_ids(answer[field]) == without_ids(direct[field])
    # As OpenAI's own types have them.
    Batch.model_validate((await stack.get(f"/v1/batches/{batch.id}")).json())
    FileObject.model_validate((await stack.get(f"/v1/files/{batch.output_file_id}")).json())
    listed = [item.endpoint async for item in client.batches.list(limit=2)]
    assert listed == list(reversed(bodies))


def without_ids(value: Any) -> Any:
    if isinstance(value, list):
        return [without_ids(item) for item in value]
    if isinstance(value, dict):
        return {name: without_ids(item) for name, item in value.items() if name != "id"}
    return value


BAD_FILES: list[tuple[bytes, str, int | None]] = [
    (b"nonsense\n", "invalid_json_line", 1),
    (jsonl([line("a", {}), line("a", {})]), "duplicate_custom_id", 2),
    (jsonl([line("a", {}, CHAT)]), "mismatched_endpoint", 1),
    (jsonl([{**line("a", {}), "method": "GET"}]), "invalid_method", 1),
    (jsonl([{**line("a", {}), "body": []}]), "invalid_body", 1),
    (b"\n\n" + jsonl([{"custom_id": 5}]), "invalid_custom_id", 3),
    (b"\n \n", "empty_file", None),
    (jsonl([line("a", {"prompt": "x" * 2_000_000})]), "line_too_long", 1),
    (jsonl(line(str(index), {}) for index in range(21)), "too_many_requests", None),
]


async def test_files_that_are_no_batch(start_stack: StartStack) -> None:
    stack = await start_stack(max_body_mib=1, max_batch_lines=20)
    async with client_of(stack) as client:
        for data, code, number in BAD_FILES:
            file = await client.files.create(file=("x", data), purpose="batch")
            batch = await client.batches.create(
                input_file_id=file.id, endpoint=COMPLETIONS, completion_window="24h"
            )
            batch = await ended(client, batch)
            assert batch.status == "failed"
            assert batch.errors is not None
            assert batch.errors.data is not None
            assert (batch.errors.data[0].code, batch.errors.data[0].line) == (code, number)
            assert (batch.output_file_id, batch.error_file_id) == (None, None)


async def test_a_batch_is_cancelled(start_stack: StartStack) -> None:
    stack = await start_stack(script(step_delay_ms=10), batch_lines_at_work=2)
    async with client_of(stack) as client:
        lines = [line(f"n{index}", {"prompt": "x", "max_tokens": 20}) for index in range(40)]
        batch = await started(client, lines)
        while batch.request_counts is None or not batch.request_counts.completed:
            await asyncio.sleep(0.02)
            batch = await client.batches.retrieve(batch.id)
        with pytest.raises(openai.ConflictError):
            await client.files.delete(batch.input_file_id)
        assert (await client.batches.cancel(batch.id)).status == "cancelling"
        batch = await ended(client, batch)
        assert batch.status == "cancelled"
        assert batch.cancelling_at is not None
        good = await results(client, batch.output_file_id)
        bad = await results(client, batch.error_file_id)
        assert good
        assert sorted([*good, *bad]) == sorted(item["custom_id"] for item in lines)
        assert {item["error"]["code"] for item in bad.values()} == {"batch_cancelled"}
        assert (await client.batches.cancel(batch.id)).status == "cancelled"


async def test_a_batch_goes_on_after_a_restart(start_stack: StartStack, run_dir: Path) -> None:
    lines = [line(f"n{index}", {"prompt": f"{index}", "max_tokens": 20, "seed": 1}) for index in range(30)]
    state = run_dir / "state"
    stack = await start_stack(script(step_delay_ms=5), state_dir=state, batch_lines_at_work=3)
    async with client_of(stack) as client:
        batch = await started(client, lines)
        while batch.request_counts is None or batch.request_counts.completed < 5:
            await asyncio.sleep(0.02)
            batch = await client.batches.retrieve(batch.id)
    await stack.restart_gateway()
    async with client_of(stack) as client:
        batch = await ended(client, await client.batches.retrieve(batch.id))
        assert batch.status == "completed"
        good = await results(client, batch.output_file_id)
        assert sorted(good) == sorted(item["custom_id"] for item in lines)
        assert batch.request_counts is not None
        assert batch.request_counts.completed == 30


async def test_gateways_that_share_a_directory_run_each_line_once(
    start_stack: StartStack, run_dir: Path
) -> None:
    lines = [line(f"n{index}", {"prompt": f"{index}", "max_tokens": 20, "seed": 1}) for index in range(16)]
    options: dict[str, Any] = {"state_dir": run_dir / "state", "batch_lines_at_work": 2, "batches_at_work": 1}
    stack = await start_stack(script(step_delay_ms=10), **options)
    async with (
        stack.another_gateway() as other,
        client_of(stack) as client,
        openai.AsyncOpenAI(base_url=f"{other}/v1", api_key="k", max_retries=0) as second,
    ):
        # One gateway has room for one batch: the other one claims the second.
        batches = [await started(client, lines) for _ in range(2)]
        while batches[1].status != "in_progress":
            await asyncio.sleep(0.02)
            batches[1] = await second.batches.retrieve(batches[1].id)
        await client.batches.cancel(batches[1].id)
        for index, batch in enumerate(batches):
            batches[index] = await ended(second, batch)
        assert [batch.status for batch in batches] == ["completed", "cancelled"]
        for batch in batches:
            good = await results(client, batch.output_file_id)
            bad = await results(client, batch.error_file_id)
            assert sorted([*good, *bad]) == sorted(item["custom_id"] for item in lines)
            assert batch.request_counts is not None
            assert batch.request_counts.completed + batch.request_counts.failed == 16
    await stack.idle()


async def test_a_file_in_use_is_not_there_for_another_key(start_stack: StartStack) -> None:
    stack = await start_stack(script(step_delay_ms=50), api_key=("a", "b"))
    async with client_of(stack, "a") as mine, client_of(stack, "b") as theirs:
        batch = await started(mine, [line("x", {"prompt": "x", "max_tokens": 500})])
        with pytest.raises(openai.NotFoundError):
            await theirs.files.delete(batch.input_file_id)
        with pytest.raises(openai.ConflictError):
            await mine.files.delete(batch.input_file_id)
        await mine.batches.cancel(batch.id)
        await ended(mine, batch)
        assert (await mine.files.delete(batch.input_file_id)).deleted


async def test_what_belongs_to_another_key_is_not_there(start_stack: StartStack) -> None:
    stack = await start_stack(api_key=("a", "b"))
    async with client_of(stack, "a") as mine, client_of(stack, "b") as theirs:
        batch = await ended(mine, await started(mine, [line("x", {"prompt": "x", "max_tokens": 1})]))
        assert batch.output_file_id is not None
        for file_id in (batch.input_file_id, batch.output_file_id):
            for method in (theirs.files.retrieve, theirs.files.content, theirs.files.delete):
                with pytest.raises(openai.NotFoundError):
                    await method(file_id)
        for act in (theirs.batches.retrieve, theirs.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                await act(batch.id)
        assert [item async for item in theirs.batches.list()] == []
        assert [item async for item in theirs.files.list()] == []
        with pytest.raises(openai.NotFoundError):
            await theirs.batches.create(
                input_file_id=batch.input_file_id, endpoint=COMPLETIONS, completion_window="24h"
            )


BOUNDARY = {"Content-Type": "multipart/form-data; boundary=b"}


def form(*parts: tuple[str, bytes], end: bytes = b"--b--\r\n") -> bytes:
    made = b""
    for disposition, data in parts:
        made += (
            b"--b\r\nContent-Disposition: form-data; " + disposition.encode() + b"\r\n\r\n" + data + b"\r\n"
        )
    return made + end


FILE = ('name="file"; filename="x"', b"{}")
PURPOSE = ('name="purpose"', b"batch")
BAD_UPLOADS: list[tuple[bytes, dict[str, str], int, str | None]] = [
    (b"", BOUNDARY, 400, "invalid_form"),
    (b"-" * 500_000, BOUNDARY, 400, "invalid_form"),
    (form(FILE, PURPOSE, end=b""), BOUNDARY, 400, "invalid_form"),
    (form(PURPOSE), BOUNDARY, 400, "missing_required_parameter"),
    (form(FILE), BOUNDARY, 400, "missing_required_parameter"),
    (form(FILE, ('name="purpose"', b"fine-tune")), BOUNDARY, 400, "invalid_value"),
    (form(FILE, PURPOSE, PURPOSE), BOUNDARY, 400, "invalid_value"),
    (form(FILE, FILE, PURPOSE), BOUNDARY, 400, "invalid_value"),
    (form(FILE, PURPOSE, ('name="x"', b"y")), BOUNDARY, 400, "unknown_parameter"),
    (form(FILE, PURPOSE, ('name="expires_after[seconds]"', b"9")), BOUNDARY, 400, "invalid_value"),
    (form(('name="file"; filename="x"', b""), PURPOSE), BOUNDARY, 400, "invalid_value"),
    (form(('name="file"; filename="x"', b"x" * 1_100_000), PURPOSE), BOUNDARY, 413, "request_too_large"),
    (form(FILE, PURPOSE), {"Content-Type": "application/json"}, 415, "unsupported_content_type"),
    (form(FILE, PURPOSE), {"Content-Type": "multipart/form-data"}, 415, "unsupported_content_type"),
    (form(*[PURPOSE] * 20), BOUNDARY, 400, "invalid_value"),
    (form((f'name="{"n" * 9000}"', b"")), BOUNDARY, 400, "invalid_form"),
]


@pytest.mark.advisory("CVE-2024-8984")
async def test_bad_uploads_leave_nothing(start_stack: StartStack) -> None:
    stack = await start_stack(max_file_mib=1)
    for body, headers, status, code in BAD_UPLOADS:
        answer = await call(stack.address, "POST", "/v1/files", body, headers)
        assert (answer.status, answer.json()["error"]["code"]) == (status, code), body[:200]
    assert (await stack.get("/v1/files")).json()["data"] == []
    assert (await call(stack.address, "POST", "/v1/files", form(FILE, PURPOSE), BOUNDARY)).status == 200
    await stack.alive()


async def test_storage_is_bounded(start_stack: StartStack) -> None:
    stack = await start_stack(max_files=3, max_files_mib=1, max_batches=1)
    async with client_of(stack) as client:
        with pytest.raises(openai.BadRequestError) as full:
            await client.files.create(file=("x", b"y" * 1_100_000), purpose="batch")
        assert full.value.code == "storage_full"
        for _ in range(3):
            await client.files.create(file=("x", b"y"), purpose="batch")
        with pytest.raises(openai.BadRequestError):
            await client.files.create(file=("x", b"y"), purpose="batch")


WHOLE = {"input_file_id": "file-x", "endpoint": COMPLETIONS, "completion_window": "24h"}
BAD_BATCHES: list[tuple[dict[str, Any], str]] = [
    ({}, "input_file_id"),
    ({"input_file_id": "file-x"}, "endpoint"),
    ({**WHOLE, "endpoint": "/v1/x"}, "endpoint"),
    ({**WHOLE, "completion_window": "1d"}, "completion_window"),
    ({**WHOLE, "completion_window": "h"}, "completion_window"),
    ({**WHOLE, "completion_window": "169h"}, "completion_window"),
    ({**WHOLE, "input_file_id": 1}, "input_file_id"),
    ({**WHOLE, "metadata": {"k": "v" * 513}}, "metadata"),
    ({**WHOLE, "output_expires_after": {"anchor": "x", "seconds": 3600}}, "output_expires_after.anchor"),
    ({**WHOLE, "x": 1}, "x"),
]


async def test_bad_batches(stack: Stack) -> None:
    for body, param in BAD_BATCHES:
        answer = await call(stack.address, "POST", "/v1/batches", body)
        assert (answer.status, answer.json()["error"]["param"]) == (400, param)
    assert (await call(stack.address, "POST", "/v1/batches", WHOLE)).status == 404


async def test_lines_with_which_an_engine_fails_and_lines_without_an_engine(
    start_stack: StartStack,
) -> None:
    stack = await start_stack(script(saying("abc", then="error")))
    async with client_of(stack) as client:
        batch = await ended(client, await started(client, [line("x", {"prompt": "x"})]))
        bad = await results(client, batch.error_file_id)
        assert bad["x"]["response"]["status_code"] >= 500
        await stack.engine.stop()
        await eventually(lambda: not stack.gateway.upstreams.models.serves(MODEL), "no engine")
        batch = await started(client, [line("y", {"prompt": "x", "max_tokens": 1})])
        while batch.status == "validating":
            await asyncio.sleep(0.02)
            batch = await client.batches.retrieve(batch.id)
        assert batch.status == "in_progress"
        assert (await client.batches.cancel(batch.id)).status == "cancelling"
        assert (await ended(client, batch)).status == "cancelled"
