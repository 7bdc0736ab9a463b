"""CheckConstraint over gRPC: what is refused, what it costs, and what it does to the others: nothing."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from catenary.rpc import error_of
from catenary.v1 import common_pb2
from catenary.v1 import tokenizer_pb2 as pb
from services.tokenizer.workers import TaskCrashed, TaskTimeout
from tests.support.tokenizer_service import RunningTokenizer, completion_request, running_tokenizer

SCHEMA, REGEX = common_pb2.CONSTRAINT_KIND_JSON_SCHEMA, common_pb2.CONSTRAINT_KIND_REGEX
GBNF = common_pb2.CONSTRAINT_KIND_GBNF
GRAMMAR, TAG = common_pb2.CONSTRAINT_KIND_GRAMMAR, common_pb2.CONSTRAINT_KIND_STRUCTURAL_TAG
INVALID = common_pb2.ERROR_CODE_INVALID_ARGUMENT


@pytest.fixture
async def tokenizer(tmp_path: Path) -> AsyncIterator[RunningTokenizer]:
    async with running_tokenizer(tmp_path) as running:
        yield running


def asking(
    kind: Any, source: Any, param: str = "response_format", **fields: Any
) -> pb.CheckConstraintRequest:
    text = source if isinstance(source, str) else json.dumps(source, ensure_ascii=False)
    return pb.CheckConstraintRequest(
        model="tiny", constraint=common_pb2.Constraint(kind=kind, source=text, **fields), param=param
    )


async def refusal(running: RunningTokenizer, request: pb.CheckConstraintRequest) -> common_pb2.Error:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await running.stub.CheckConstraint(request)
    return error_of(caught.value)


async def test_verdicts(tokenizer: RunningTokenizer) -> None:
    honoured: list[tuple[Any, Any]] = [
        (SCHEMA, {"type": "object", "properties": {"é": {"enum": ["开心"]}}}),
        (REGEX, "(a+)+b"),
        (GBNF, 'root ::= "a" | "é" root'),
        (GRAMMAR, 'start: "a" <|im_end|>'),
        (TAG, {"triggers": ["<t>"], "structures": [{"begin": "<t>", "schema": {}, "end": "</t>"}]}),
        (TAG, {"triggers": ["<tool_call>"], "structures": [{"begin": "<tool_call>", "schema": {}}]}),
    ]
    for kind, source in honoured:
        await tokenizer.stub.CheckConstraint(asking(kind, source))
        await tokenizer.stub.CheckConstraint(asking(kind, source, after="</think>"))
    (worker,) = tokenizer.service.pool.pids
    refused: list[tuple[Any, Any, str]] = [
        (SCHEMA, {"contains": {}}, "'contains'"),
        (REGEX, "[", "class"),
        (GRAMMAR, "start: start", "no text"),
        (GRAMMAR, "start: <|nobody|>", "control token"),
        (TAG, {}, "field"),
    ]
    for kind, source, named in refused:
        for _ in range(2):
            error = await refusal(tokenizer, asking(kind, source, param="tools.0"))
            assert (error.code, error.param) == (INVALID, "tools.0")
            assert named in error.message
    assert tokenizer.service.pool.pids == (worker,)


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        (asking(0, "{}"), "kind"),
        (asking(99, "{}"), "kind"),
        (asking(SCHEMA, "{}", after=""), "256"),
        (asking(SCHEMA, "{}", after="x" * 257), "256"),
        (asking(REGEX, "é" * 70_000), "131072"),
    ],
)
async def test_shapes(tokenizer: RunningTokenizer, request_: pb.CheckConstraintRequest, named: str) -> None:
    error = await refusal(tokenizer, request_)
    assert (error.code, error.param) == (INVALID, "response_format")
    assert named in error.message


async def test_another_model_is_not_found(tokenizer: RunningTokenizer) -> None:
    request = asking(SCHEMA, "{}")
    request.model = "other"
    assert (await refusal(tokenizer, request)).code == common_pb2.ERROR_CODE_MODEL_NOT_FOUND


@pytest.mark.advisory("GHSA-hf3c-wxg2-49q9")
async def test_verdicts_are_remembered_and_bounded(tmp_path: Path) -> None:
    async with running_tokenizer(tmp_path, constraint_cache=2) as running:
        tasks: list[Any] = []
        run = running.service.pool.run

        async def counted(task: Any, **options: Any) -> Any:
            tasks.append(task)
            return await run(task, **options)

        running.service.pool.run = counted  # type: ignore[method-assign]
        for source in ("a", "b", "a", "c", "a", "b"):
            await running.stub.CheckConstraint(asking(REGEX, source))
        assert [task.source for task in tasks] == ["a", "b", "c", "b"]


@pytest.mark.advisory("CVE-2026-55574")
async def test_a_constraint_that_kills_or_holds_a_worker_is_refused(tmp_path: Path) -> None:
    """And is not tried again for a while; whoever renders meanwhile does not notice."""
    async with running_tokenizer(tmp_path, workers=2, constraint_timeout_s=1.5) as running:
        tries: list[str] = []
        run = running.service.pool.run

        async def failing(task: Any, **options: Any) -> Any:
            source = getattr(task, "source", None)
            if source is None:
                return await run(task, **options)
            tries.append(source)
            if source == "once" and tries.count("once") > 1:
                return await run(task, **options)
            raise TaskTimeout if source == "slow" else TaskCrashed

        running.service.pool.run = failing  # type: ignore[method-assign]
        for _ in range(2):
            error = await refusal(running, asking(REGEX, "slow"))
            assert (error.code, error.param) == (INVALID, "response_format")
            assert "1.5 s" in error.message
            error = await refusal(running, asking(REGEX, "deadly"))
            assert "too complex" in error.message
        await running.stub.CheckConstraint(asking(REGEX, "once"))
        assert sorted(tries) == ["deadly", "deadly", "once", "once", "slow"]
        await running.stub.Render(completion_request("still here"))


async def test_time_and_memory_are_limits_of_their_own(tmp_path: Path) -> None:
    # Allowed, but large: its optional properties are a quadratic number of rules.
    large = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1000)}}
    async with running_tokenizer(tmp_path, workers=2, constraint_timeout_s=0.05) as running:
        assert "0.05 s" in (await refusal(running, asking(SCHEMA, large))).message
        await running.stub.Render(completion_request("still here"))
    async with running_tokenizer(tmp_path, constraint_memory_mib=1) as running:
        error = await refusal(running, asking(SCHEMA, large))
        assert (error.code, "comple" in error.message or "memory" in error.message) == (INVALID, True)
        await running.stub.Render(completion_request("still here"))


@pytest.mark.advisory("CVE-2026-55574")
async def test_hostile_constraints_are_judged_quickly(
    tokenizer: RunningTokenizer, say: Callable[[str], None]
) -> None:
    """The time that each takes is printed; none takes the worker's life."""
    (worker,) = tokenizer.service.pool.pids
    await tokenizer.stub.CheckConstraint(asking(REGEX, "warm"))
    for name, kind, source in HOSTILE:
        started = time.perf_counter()
        error = await refusal(tokenizer, asking(kind, source))
        say(f"{name}: {1000 * (time.perf_counter() - started):.1f} ms: {error.message}")
        assert (error.code, error.param) == (INVALID, "response_format")
    for name, kind, source in HARMLESS:
        started = time.perf_counter()
        await tokenizer.stub.CheckConstraint(asking(kind, source))
        say(f"{name}: harmless, compiled in {1000 * (time.perf_counter() - started):.1f} ms")
    assert tokenizer.service.pool.pids == (worker,)


@pytest.mark.advisory("GHSA-hf3c-wxg2-49q9")
async def test_many_schemas_fill_nothing(tokenizer: RunningTokenizer) -> None:
    """Memory of the service and of its worker stays flat (advisory of xgrammar's cache)."""

    def resident() -> int:
        pids = ("self", *map(str, tokenizer.service.pool.pids))
        return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 for pid in pids)

    async def check(numbers: range) -> None:
        for number in numbers:
            schema = {"type": "object", "properties": {f"p{number}": {"type": "integer"}}}
            await tokenizer.stub.CheckConstraint(asking(SCHEMA, schema))

    await check(range(60))
    before = resident()
    await asyncio.wait_for(check(range(60, 560)), 60)
    assert resident() - before < 8 << 20


HOSTILE: list[tuple[str, Any, Any]] = [
    ("invalid type", SCHEMA, {"properties": {"a": {"type": "stsring"}}}),
    ("invalid regex", REGEX, "["),
    ("look-behind", REGEX, "(?<=a)b"),
    ("back reference", REGEX, "\\1"),
    ("long repetition", REGEX, "a{99999}"),
    ("template in a pattern", SCHEMA, {"type": "string", "pattern": "{{ 7*7 }}"}),
    ("nested repetitions", REGEX, "(a{1,1000}){1,1000}"),
    ("30,000 parentheses", REGEX, "(" * 30_000 + "a"),
    ("30,000 parentheses of a grammar", GBNF, "root ::= " + "(" * 30_000 + '"a"'),
    ("30,000 parentheses of Lark", GRAMMAR, "start: " + "(" * 30_000 + '"a"'),
    ("empty grammar", GRAMMAR, ""),
    ("empty schema text", SCHEMA, ""),
    ("root is root", GBNF, "root ::= root"),
    ("root is a is root", GBNF, "root ::= a\na ::= root"),
    ("20,000 strings", SCHEMA, {"enum": [f"{i}" for i in range(20_000)]}),
    ("depth 5000", SCHEMA, '{"properties":{"a":' * 5000 + "{}" + "}}" * 5000),
    ("100,000 brackets", SCHEMA, "[" * 100_000),
    ("5000 rules in a chain", GRAMMAR, "".join(f"r{i}: r{i + 1}\n" for i in range(5000)) + "start: r0"),
    ("a large divisor", SCHEMA, {"type": "integer", "multipleOf": 1000003}),
    (
        "30 choices of two",
        SCHEMA,
        {"allOf": [{"anyOf": [{"minimum": i}, {"type": "string", "minLength": i}]} for i in range(30)]},
    ),
    ("a circle of references", SCHEMA, {"$ref": "#"}),
]
HARMLESS: list[tuple[str, Any, Any]] = [
    ("(a|a)*b", REGEX, "(a|a)*b"),
    ("(a+)+b", REGEX, "(a+)+b"),
    ("(.*){1,1000}", REGEX, "(.*){1,1000}"),
    ("union with null", SCHEMA, {"type": ["string", "null"]}),
    ("2000 strings", SCHEMA, {"enum": [f"{i}" for i in range(2000)]}),
    ("1000 properties", SCHEMA, {"type": "object", "properties": {f"p{i}": {} for i in range(1000)}}),
]
