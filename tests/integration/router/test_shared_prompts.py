"""Samples that share a prompt on their way from a gateway to an engine's core."""

from __future__ import annotations

from catenary.v1 import common_pb2
from tests.support.router_fakes import FakeEngine, FakeGateway, running_router, spec, until
from tests.support.specs import expected_tokens, sequence_spec

BUSY = common_pb2.Error(code=common_pb2.ERROR_CODE_OVERLOADED, message="full", retryable=True)


async def test_followers_go_to_the_leaders_engine_with_its_handle_there(monkeypatch):
    async with (
        running_router(monkeypatch) as (router, address),
        FakeEngine(address, name="a", auto=False) as first,
        FakeEngine(address, name="b", auto=False) as second,
        FakeGateway(address) as gateway,
    ):
        await until(lambda: gateway.serving() == 2)
        await gateway.submit(10, spec([1, 2]))
        for handle in range(11, 15):
            await gateway.submit(handle, spec([1, 2]), same_prompt_as=10)
        # Unknown, and its own: both mean nothing. The other engine is idle.
        await gateway.submit(20, spec([1, 2]), same_prompt_as=99)
        await gateway.submit(21, spec([1, 2]), same_prompt_as=21)
        await until(lambda: len(first.submitted) + len(second.submitted) == 7)
        with_leader, other = sorted((first, second), key=lambda engine: -len(engine.submitted))
        lead, *followers = with_leader.submitted
        assert not lead.HasField("same_prompt_as")
        assert [one.same_prompt_as for one in followers] == [lead.handle] * 4
        assert [one.HasField("same_prompt_as") for one in other.submitted] == [False, False]
        placed = {engine.name: (engine.placed_sequences, engine.placed_tokens) for engine in router.fleet}
        assert placed == {with_leader.name: (5, 10), other.name: (2, 4)}
        # A leader that has ended is none; the sequence goes where there is room.
        await gateway.abort(10)
        await gateway.ended(10)
        await gateway.submit(30, spec([1, 2]), same_prompt_as=10)
        await until(lambda: len(other.submitted) == 3)
        assert not other.submitted[-1].HasField("same_prompt_as")
        # An engine that leaves takes its leaders along, and nothing else waits for them.
        await with_leader.kill()
        await gateway.ended(11, 12, 13, 14)
        await gateway.submit(31, spec([1, 2]), same_prompt_as=11)
        await until(lambda: len(other.submitted) == 4)
        await other.step(16)
        await gateway.ended(20, 21, 30, 31)
        assert router.admission.live_sequences == router.admission.live_tokens == 0


async def test_a_full_engine_does_not_keep_followers_to_itself(monkeypatch):
    async with (
        running_router(monkeypatch) as (router, address),
        FakeEngine(address, name="a", auto=False, max_running=2) as first,
        FakeEngine(address, name="b", auto=False, max_running=2) as second,
        FakeGateway(address) as gateway,
    ):
        await until(lambda: gateway.serving() == 2)
        await gateway.submit(1, spec([1, 2]))
        for handle in (2, 3, 4):
            await gateway.submit(handle, spec([1, 2]), same_prompt_as=1)
        await until(lambda: len(first.submitted) == len(second.submitted) == 2)
        hints = sorted(one.HasField("same_prompt_as") for one in (*first.submitted, *second.submitted))
        assert hints == [False, False, False, True]
        for engine in (first, second):
            await engine.step(16)
        await gateway.ended(1, 2, 3, 4)
        assert all(engine.placed_sequences == engine.placed_tokens == 0 for engine in router.fleet)


async def test_a_follower_that_is_refused_is_placed_again_without_the_hint(monkeypatch):
    async with (
        running_router(monkeypatch) as (_, address),
        FakeEngine(address, name="a", auto=False) as first,
        FakeEngine(address, name="b", auto=False) as second,
        FakeGateway(address) as gateway,
    ):
        await until(lambda: gateway.serving() == 2)
        await gateway.submit(1, spec([1, 2]))
        await until(lambda: bool(first.submitted or second.submitted))
        leads, other = (first, second) if first.submitted else (second, first)
        leads.refuse_with = BUSY
        await gateway.submit(2, spec([1, 2]), same_prompt_as=1)
        await until(lambda: bool(other.submitted))
        assert leads.submitted[-1].HasField("same_prompt_as")
        assert not other.submitted[-1].HasField("same_prompt_as")


async def test_an_engine_names_the_core_the_leader_by_its_key(fake_router, start_engine):
    engine = await start_engine()
    router = await fake_router.attached()
    taken = []
    core = engine.app.frontend.core
    submit = core.submit
    core.submit = lambda sequence: (taken.append(sequence), submit(sequence))
    engine.faults.stalled = True
    await router.submit(0, sequence_spec([5, 6]))
    await router.submit(7, sequence_spec([5, 6], seed=8), same_prompt_as=0)
    await router.submit(8, sequence_spec([5, 6], seed=9), same_prompt_as=4)
    await until(lambda: len(taken) == 3)
    lead = taken[0].key
    assert [one.same_prompt_as for one in taken] == [0, lead, 0]
    engine.faults.resume()
    await router.end_of(8)
    assert router.tokens[7] == expected_tokens([5, 6], 8, seed=8)
