"""What is refused before an engine sees it, and limits that say their value."""

from __future__ import annotations

import pytest

from catenary.v1 import common_pb2
from tests.support.router_fakes import FakeEngine, FakeGateway, running_router, spec, until


@pytest.mark.parametrize(
    ("sequence", "code", "param"),
    [
        (spec([1], model="nope"), common_pb2.ERROR_CODE_MODEL_NOT_FOUND, "model"),
        (spec([1], model=""), common_pb2.ERROR_CODE_INVALID_ARGUMENT, "model"),
        (spec([1], model="m" * 300), common_pb2.ERROR_CODE_INVALID_ARGUMENT, "model"),
        (spec([]), common_pb2.ERROR_CODE_INVALID_ARGUMENT, "prompt"),
        (spec([1] * 101), common_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED, "prompt"),
        (
            common_pb2.SequenceSpec(model="scripted", token_ids=[1], prompt_len=2),
            common_pb2.ERROR_CODE_INVALID_ARGUMENT,
            "prompt_len",
        ),
        (
            common_pb2.SequenceSpec(model="scripted", token_ids=[1], prompt_len=0),
            common_pb2.ERROR_CODE_INVALID_ARGUMENT,
            "prompt_len",
        ),
    ],
)
async def test_bad_requests_are_refused_by_the_router(monkeypatch, sequence, code, param):
    async with (
        running_router(monkeypatch, max_request_tokens=100) as (router, address),
        FakeEngine(address) as engine,
        FakeGateway(address) as gateway,
    ):
        await gateway.submit(1, sequence)
        await gateway.ended(1)
        assert gateway.refusals[1].code == code
        assert gateway.refusals[1].param == param
        assert not engine.submitted
        assert router.admission.live_sequences == 0


async def test_limits_and_duplicates(monkeypatch):
    async with (
        running_router(monkeypatch, max_live_sequences=2, retry_after_ms=123) as (_, address),
        FakeEngine(address, auto=False) as engine,
        FakeGateway(address) as gateway,
    ):
        named = spec([1])
        named.request_id = "same"
        await gateway.submit(1, named)
        await gateway.submit(2, named)
        await gateway.ended(2)
        assert gateway.refusals[2].code == common_pb2.ERROR_CODE_DUPLICATE_REQUEST
        await gateway.submit(3, spec([1]))
        await gateway.submit(4, spec([1]))
        await gateway.ended(4)
        assert gateway.refusals[4].code == common_pb2.ERROR_CODE_OVERLOADED
        assert gateway.refusals[4].retry_after_ms == 123
        assert "max-live-sequences" in gateway.refusals[4].message
        await gateway.submit(1, spec([1]))
        await until(lambda: 1 in gateway.refusals)
        assert gateway.refusals[1].code == common_pb2.ERROR_CODE_DUPLICATE_REQUEST
        await until(lambda: len(engine.live) == 2)
