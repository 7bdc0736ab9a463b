"""Admission over gRPC: who waits, who comes next, who is told to come back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from catenary.rpc import open_channel
from catenary.v1 import common_pb2, engine_pb2, router_pb2, router_pb2_grpc
from tests.support.router_fakes import (
    CLIENT_SECRET,
    FakeEngine,
    FakeGateway,
    expected,
    running_router,
    spec,
    until,
)

SYSTEM = common_pb2.PRIORITY_CLASS_SYSTEM
INTERACTIVE = common_pb2.PRIORITY_CLASS_INTERACTIVE
DEFAULT = common_pb2.PRIORITY_CLASS_DEFAULT
BULK = common_pb2.PRIORITY_CLASS_BULK


def asked(tokens: Sequence[int], **fields: Any) -> common_pb2.SequenceSpec:
    wanted = spec(list(tokens))
    wanted.MergeFrom(common_pb2.SequenceSpec(**fields))
    return wanted


async def lanes(address: str) -> dict[int, router_pb2.Lane]:
    async with open_channel(address, secret=CLIENT_SECRET) as channel:
        view = await router_pb2_grpc.RouterServiceStub(channel).GetFleet(router_pb2.GetFleetRequest())
    return {lane.priority_class: lane for lane in view.lanes}


def _submitted(engine: FakeEngine, count: int) -> bool:
    return len(engine.submitted) == count


async def served_in_turn(engine: FakeEngine, gateway: FakeGateway, count: int) -> list[int]:
    """First prompt tokens in the order in which an engine with one place gets them."""
    for number in range(count):
        await until(partial(_submitted, engine, number + 1))
        await engine.step(16)
    return [submit.spec.token_ids[0] for submit in engine.submitted]


async def test_classes_tenants_and_resumed_ones_in_their_order(monkeypatch):
    async with (
        running_router(monkeypatch, fair_quantum=4) as (router, address),
        FakeEngine(address, auto=False, max_running=1) as engine,
        FakeGateway(address) as gateway,
    ):
        await gateway.submit(1, asked([1]))
        await until(lambda: engine.submitted)
        waiting = [
            (2, asked([2], priority_class=BULK)),
            # Two tickets of one quantum each, before those of a tenant that came later.
            (3, asked([3] * 4, tenant="flood")),
            (4, asked([4] * 4, tenant="flood")),
            (5, asked([5] * 4, tenant="flood")),
            (6, asked([6] * 4, tenant="other")),
            (7, asked([7], priority_class=SYSTEM)),
            (8, asked([8], priority_class=INTERACTIVE)),
        ]
        for handle, sequence in waiting:
            await gateway.submit(handle, sequence)
        await gateway.submit(9, asked([9]), resumed=True)
        await until(lambda: router.admission.live_sequences == 9)
        view = await lanes(address)
        assert view[DEFAULT].queued_sequences == 5
        assert (view[DEFAULT].queued_tokens, view[DEFAULT].tenants) == (17, 3)
        assert (view[BULK].queued_sequences, view[DEFAULT].live_sequences) == (1, 1)
        order = await served_in_turn(engine, gateway, 9)
        assert order == [1, 7, 8, 9, 3, 6, 4, 5, 2]
        await gateway.ended(*range(1, 10))
        for handle, sequence in waiting:
            assert gateway.tokens[handle] == expected(sequence.token_ids)
        view = await lanes(address)
        assert [view[each].admitted for each in (SYSTEM, INTERACTIVE, DEFAULT, BULK)] == [1, 1, 6, 1]
        assert all(not lane.live_sequences and not lane.queued_tokens for lane in view.values())
        assert router.admission.live_sequences == router.admission.live_tokens == 0


async def test_a_wait_ends_and_a_full_queue_is_told_to_gateways(monkeypatch):
    options = {"lane_sequences": (1, 1, 2, 1), "retry_after_ms": 200, "max_retry_after_ms": 300}
    async with (
        running_router(monkeypatch, **options) as (_, address),
        FakeEngine(address, auto=False, max_running=1) as engine,
        FakeGateway(address) as gateway,
        FakeGateway(address) as late,
    ):
        await gateway.submit(1, asked([1]))
        await until(lambda: engine.submitted)
        # No time to wait at all.
        await gateway.submit(2, asked([2], max_wait_ms=0))
        await gateway.ended(2)
        assert gateway.refusals[2].code == common_pb2.ERROR_CODE_TIMEOUT
        for handle in (3, 4):
            await gateway.submit(handle, asked([handle], max_wait_ms=1500))
        await until(lambda: late.shed)
        (entry,) = late.shed[0].entries
        assert (entry.model, entry.priority_class, entry.code) == (
            "scripted",
            DEFAULT,
            common_pb2.ERROR_CODE_OVERLOADED,
        )
        assert 200 <= entry.retry_after_ms <= 300
        await gateway.submit(5, asked([5]))
        await gateway.ended(5)
        assert gateway.refusals[5].code == common_pb2.ERROR_CODE_OVERLOADED
        assert 200 <= gateway.refusals[5].retry_after_ms <= 300
        assert "lane-sequences" in gateway.refusals[5].message
        # A resumed one is not refused, and a new gateway learns at once what is full.
        await gateway.submit(6, asked([6]), resumed=True)
        async with FakeGateway(address) as newcomer:
            await until(lambda: newcomer.shed)
        await gateway.ended(3, 4)
        assert {gateway.refusals[handle].code for handle in (3, 4)} == {common_pb2.ERROR_CODE_TIMEOUT}
        await until(lambda: not late.shed[-1].entries)
        await engine.step(16)
        await until(lambda: len(engine.submitted) == 2)
        await engine.step(16)
        await gateway.ended(1, 6)
        lane = (await lanes(address))[DEFAULT]
        assert (lane.refused, lane.timed_out) == (1, 3)


async def test_what_does_not_fit_waits_for_kv_or_is_refused_at_once(monkeypatch):
    async with (
        running_router(monkeypatch) as (_, address),
        FakeEngine(address, auto=False, total_blocks=4, publishes_kv=True, reports=False) as engine,
        FakeGateway(address) as gateway,
    ):
        await gateway.submit(1, asked([1] * 128))
        await gateway.ended(1)
        assert gateway.refusals[1].code == common_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED
        assert (gateway.refusals[1].param, gateway.refusals[1].retryable) == ("prompt", False)
        for handle in (2, 3, 4):
            await gateway.submit(handle, asked([handle] * 50))
        await until(lambda: len(engine.submitted) == 2)
        assert (await lanes(address))[DEFAULT].queued_sequences == 1
        # The report counts for more than what was placed.
        await engine.report(used_blocks=4, running=2)
        await gateway.abort(2)
        await until(lambda: 2 in gateway.ends)
        assert len(engine.submitted) == 2
        await engine.report(used_blocks=1, running=1)
        await engine.report(used_blocks=1, running=1)
        await until(lambda: len(engine.submitted) == 3)
        await engine.step(16)
        await gateway.ended(3, 4)


async def test_a_quarantined_sequence_has_an_engine_for_itself_until_its_first_token(monkeypatch):
    async with (
        running_router(monkeypatch) as (router, address),
        FakeEngine(address, auto=False) as engine,
        FakeGateway(address) as gateway,
    ):
        await gateway.submit(1, asked([1]))
        await until(lambda: engine.submitted)
        await gateway.submit(2, asked([2]), alone=True)
        await gateway.submit(3, asked([3]))
        await until(lambda: router.admission.live_sequences == 3)
        assert len(engine.submitted) == 1
        await engine.step(16)
        await until(lambda: len(engine.submitted) == 2)
        assert engine.submitted[1].spec.token_ids[0] == 2
        await gateway.submit(4, asked([4]))
        await until(lambda: router.admission.live_sequences == 3)
        assert len(engine.submitted) == 2
        await engine.step(1)
        await until(lambda: len(engine.submitted) == 4)
        await engine.step(16)
        await gateway.ended(1, 2, 3, 4)
        # One that is given up while it waits keeps nothing.
        await gateway.submit(5, asked([5]))
        await until(lambda: len(engine.submitted) == 5)
        await gateway.submit(6, asked([6]), alone=True)
        await gateway.abort(6)
        await gateway.ended(6)
        await gateway.submit(7, asked([7]))
        await until(lambda: len(engine.submitted) == 6)
        await engine.step(16)
        await gateway.ended(5, 7)
        assert router.admission.live_sequences == 0


@pytest.mark.parametrize("how", ["restarts", "drains", "stays away"])
async def test_requests_wait_while_a_models_only_engine_is_away(monkeypatch, how):
    wait_s = 0.5 if how == "stays away" else 20
    async with (
        running_router(monkeypatch, unserved_wait_s=wait_s, lane_wait_s=(9, 9, 1, 9)) as (router, address),
        FakeGateway(address) as gateway,
    ):
        async with FakeEngine(address, name="a") as engine:
            await until(lambda: gateway.serving() == 1)
            if how == "drains":
                engine.state = engine_pb2.ENGINE_STATE_DRAINING
                await until(lambda: gateway.serving() == 0)
                await gateway.submit(1, asked([1], priority_class=INTERACTIVE))
                await until(lambda: router.admission.live_sequences == 1)
        # Else it may be placed on the engine that is about to be lost.
        await until(lambda: gateway.serving() == 0)
        await gateway.submit(2, asked([2]) if how == "stays away" else asked([2], priority_class=BULK))
        if how == "stays away":
            await gateway.ended(2)
            assert gateway.refusals[2].code == common_pb2.ERROR_CODE_UNAVAILABLE
            await gateway.submit(3, asked([3], priority_class=BULK))
            await gateway.ended(3)
            assert gateway.refusals[3].code == common_pb2.ERROR_CODE_UNAVAILABLE
            return
        await until(lambda: router.admission.live_sequences == (2 if how == "drains" else 1))
        async with FakeEngine(address, name="b"):
            await gateway.ended(*((1, 2) if how == "drains" else (2,)))
        assert gateway.tokens[2] == expected([2])


async def test_a_flood_of_ten_thousand_is_bounded_and_leaves_nothing(monkeypatch):
    options = {
        "max_live_sequences": 3000,
        "lane_sequences": (10, 100, 200, 100),
        "lane_wait_s": (5, 5, 60, 60),
    }
    async with (
        running_router(monkeypatch, **options) as (router, address),
        FakeEngine(address, auto=False, max_running=10) as engine,
        FakeGateway(address) as gateway,
    ):
        await until(lambda: gateway.serving() == 1)
        for handle in range(10_000):
            # A client that invents tenants as it goes.
            await gateway.submit(handle, asked([handle % 900], tenant=f"t{handle}"))
        await until(lambda: len(gateway.refusals) == 10_000 - 210, timeout_s=60)
        assert router.admission.live_sequences == 210
        assert {error.code for error in gateway.refusals.values()} == {common_pb2.ERROR_CODE_OVERLOADED}
        while len(gateway.ends) < 210:
            await engine.step(16)
            await until(lambda: engine.live or len(gateway.ends) == 210)
        queue = router.dispatcher.lifecycle.queues.queue_of("scripted")
        assert (queue.idle, len(queue.waiting_tenants())) == (True, 0)
        assert router.admission.live_sequences == router.admission.live_tokens == 0
