"""Prompts and what follows them on different engines, over real gRPC: byte-exact, whatever goes wrong."""

from __future__ import annotations

import asyncio

import pytest

from catenary.schema import MINIMUM_PEER_REVISION, SCHEMA_REVISION
from catenary.v1 import common_pb2, router_pb2
from catenary_testing.engine import Rule, Script, ScriptedCapacity, Then
from catenary_testing.engine.script import Match
from tests.support.specs import expected_tokens, sequence_spec
from tests.support.waiting import eventually

PROMPT = [3 + at * 7 % 100 for at in range(60)]
ROUTER = {"handover_min_tokens": 16}


async def roles(start_fleet, *names, script=None, **options):
    """A fleet with one engine of each of these roles."""
    fleet = await start_fleet(engines=0, router={**ROUTER, **options})
    for name in names:
        await fleet.add_engine(role=name, script=script or Script())
    await fleet.serving(len(names))
    return fleet


def count(fleet, result):
    registry = fleet.router.metrics.registry
    return registry.get_sample_value("catenary_router_handovers_total", {"result": result})


async def test_many_prompts_are_byte_exact_and_none_is_computed_twice(start_fleet):
    fleet = await roles(start_fleet, "prefill", "prefill", "decode", "decode")
    prompts = [[number, *PROMPT[: 20 + number]] for number in range(30)]
    answers = await asyncio.gather(
        *[fleet.answer(sequence_spec(prompt, max_tokens=12)) for prompt in prompts]
    )
    for prompt, (tokens, end) in zip(prompts, answers, strict=True):
        assert tokens == expected_tokens(prompt, 12)
        assert end.usage.prompt_tokens == len(prompt)
        assert end.usage.transferred_tokens + end.usage.cached_tokens >= len(prompt) - 1
    assert (count(fleet, "begun"), count(fleet, "done")) == (30, 30)
    made = [engine.app.frontend.transfers.made for engine in fleet.engines]
    arrived = [engine.app.frontend.transfers.arrived for engine in fleet.engines]
    assert (sum(made[:2]), sum(arrived[2:])) == (30, 30)
    await fleet.idle()


async def test_short_prompts_and_scored_ones_go_straight_to_the_second(start_fleet):
    fleet = await roles(start_fleet, "prefill", "decode")
    short, _ = await fleet.answer(sequence_spec([1, 2, 3]))
    assert short == expected_tokens([1, 2, 3], 8)
    scored = sequence_spec(PROMPT)
    scored.response.prompt_logprobs = 0
    assert (await fleet.answer(scored))[0] == expected_tokens(PROMPT, 8)
    assert count(fleet, "begun") == 0


async def test_kv_that_does_not_arrive_is_computed(start_fleet):
    fleet = await roles(start_fleet, "prefill", "decode")
    prefill, decode = fleet.engines
    decode.faults.fail_transfers = 1
    decode.faults.stall_after_tokens = 2
    answer = asyncio.create_task(fleet.answer(sequence_spec(PROMPT)))
    # With its first tokens nobody wants the KV any more.
    await eventually(lambda: prefill.app.frontend.transfers.withdrawn == 1, "the withdrawal")
    assert decode.app.frontend.live_sequences == 1
    decode.faults.resume()
    tokens, end = await answer
    assert tokens == expected_tokens(PROMPT, 8)
    assert end.usage.transferred_tokens == 0
    assert count(fleet, "recomputed") == 1
    assert decode.app.frontend.transfers.faults == {"mismatch": 1}
    await fleet.idle()


@pytest.mark.parametrize("how", ["refusal", "error", "crash", "loss"])
async def test_the_first_engine_fails(start_fleet, how):
    then = {"error": Then.ERROR, "crash": Then.CRASH}.get(how)
    rules = (Rule(match=Match.ANY, then=then),) if then else ()
    fleet = await start_fleet(engines=0, router=ROUTER)
    # It crashes between two steps of the prompt.
    capacity = ScriptedCapacity(max_batched_tokens=32)
    prefill = await fleet.add_engine(role="prefill", script=Script(rules=rules, capacity=capacity))
    await fleet.add_engine(role="decode")
    await fleet.serving(2)
    if how == "refusal":
        prefill.faults.refuse_next()
    if how == "loss":
        prefill.faults.stalled = True
    answer = asyncio.create_task(fleet.answer(sequence_spec(PROMPT)))
    if how == "loss":
        await eventually(lambda: prefill.app.frontend.live_sequences == 1, "the first half")
        prefill.drop_streams()
    tokens, end = await answer
    assert tokens == expected_tokens(PROMPT, 8)
    assert end.usage.transferred_tokens == 0
    expected = {"refusal": "refused", "error": "failed", "crash": "lost", "loss": "lost"}[how]
    assert count(fleet, expected) == 1


async def test_the_second_engine_is_lost_before_its_first_token(start_fleet):
    fleet = await roles(start_fleet, "prefill", "decode", "both")
    decode = fleet.engines[1]
    decode.faults.stalled = True
    answer = asyncio.create_task(fleet.answer(sequence_spec(PROMPT, max_tokens=20)))
    await eventually(lambda: decode.app.frontend.live_sequences == 1, "the second half")
    decode.drop_streams()
    tokens, end = await answer
    assert tokens == expected_tokens(PROMPT, 20)
    assert end.usage.transferred_tokens == 0
    assert (count(fleet, "offered"), count(fleet, "lost")) == (1, 1)
    decode.faults.resume()
    await eventually(lambda: fleet.engines[0].app.frontend.transfers.withdrawn == 1, "the withdrawal")
    await fleet.idle()


async def test_a_client_that_goes_away_leaves_nothing_in_either_engine(start_fleet):
    fleet = await roles(start_fleet, "prefill", "decode")
    prefill, decode = fleet.engines
    for engine in (prefill, decode):
        engine.faults.stalled = True
        call = fleet.generate(sequence_spec(PROMPT))
        reader = asyncio.create_task(call.read())
        await eventually(lambda engine=engine: engine.app.frontend.live_sequences == 1, "the half")
        call.cancel()
        reader.cancel()
        engine.faults.resume()
        await fleet.idle()
    await eventually(lambda: prefill.app.frontend.transfers.withdrawn >= 1, "the withdrawal")


async def test_samples_of_one_prompt_transfer_it_once(start_fleet):
    fleet = await roles(start_fleet, "prefill", "decode", script=Script(capacity=ScriptedCapacity()))
    session = fleet.stub.Session()
    hello = router_pb2.SessionHello(
        schema_revision=SCHEMA_REVISION,
        minimum_peer_revision=MINIMUM_PEER_REVISION,
        instance_id="gateway",
    )
    await session.write(router_pb2.SessionRequest(hello=hello))
    for handle in (1, 2, 3):
        spec = sequence_spec(PROMPT, seed=handle)
        submit = common_pb2.Submit(handle=handle, spec=spec, same_prompt_as=1 if handle > 1 else None)
        await session.write(router_pb2.SessionRequest(submit=submit))
    tokens: dict[int, list[int]] = {1: [], 2: [], 3: []}
    ended = 0
    while ended < 3:
        response = await session.read()
        if response.WhichOneof("payload") != "step":
            continue
        ids = list(response.step.token_ids)
        for handle, number in zip(response.step.handles, response.step.token_counts, strict=True):
            tokens[handle] += ids[:number]
            del ids[:number]
        ended += len(response.step.ends)
    # What engines tell each other through the router is not for gateways to say.
    for number, fields in enumerate(({"prefill_only": True}, {"kv_offer": common_pb2.KvOffer()}), 10):
        submit = common_pb2.Submit(handle=number, spec=sequence_spec(PROMPT), **fields)
        await session.write(router_pb2.SessionRequest(submit=submit))
        while (response := await session.read()).WhichOneof("payload") != "refusal":
            continue
        assert response.refusal.error.code == common_pb2.ERROR_CODE_INVALID_ARGUMENT
        assert response.refusal.error.param in fields
    session.cancel()
    assert tokens == {handle: expected_tokens(PROMPT, 8, seed=handle) for handle in tokens}
    assert (count(fleet, "begun"), count(fleet, "done")) == (1, 1)
