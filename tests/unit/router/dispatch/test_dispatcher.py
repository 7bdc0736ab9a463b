"""The dispatcher: refusals, aborts, usage, metrics, and calls that go on."""

from __future__ import annotations

import pytest

from catenary.resume import Cause, ResumePolicy
from catenary.v1 import common_pb2, engine_pb2
from services.router.admission import Refused
from services.router.dispatch import AbortCause, LossReason, PlainCall
from tests.support.dispatcher import World
from tests.support.waiting import eventually


def test_a_refused_sequence_is_tried_once_elsewhere():
    world = World()
    first, second = world.attach("a"), world.attach("b")
    world.submit(1)
    held, other = (first, second) if first.sequences else (second, first)
    busy = common_pb2.Error(code=common_pb2.ERROR_CODE_OVERLOADED, message="busy", retryable=True)
    world.send(held, refusal=common_pb2.Refusal(handle=next(iter(held.sequences)), error=busy))
    assert not held.sequences
    assert len(other.sequences) == 1
    assert held.engine.placed_sequences == 0
    assert other.engine.placed_sequences == 1
    world.send(other, refusal=common_pb2.Refusal(handle=next(iter(other.sequences)), error=busy))
    # Both say that they are full. Neither is asked again before it says how it is; then the wait goes on.
    world.tick()
    assert not world.sink.over
    assert len(world.dispatcher.lifecycle.queues) == 1
    assert other.engine.placed_sequences == 0
    world.submit(2)
    load = engine_pb2.LoadReport(sequence=1, state=engine_pb2.ENGINE_STATE_SERVING)
    world.send(other, load=load)
    world.tick()
    assert [s.handle for s in other.sequences.values()] == [1, 2]
    broken = common_pb2.Error(code=common_pb2.ERROR_CODE_INTERNAL, message="broken", retryable=True)
    for handle in list(other.sequences):
        world.send(other, refusal=common_pb2.Refusal(handle=handle, error=broken))
    assert world.sink.over[1] == world.sink.over[2] == broken
    world.check_idle()


def test_a_refusal_after_output_is_a_failure_not_a_retry():
    world = World()
    link, _ = world.attach("a"), world.attach("b")
    world.submit(1)
    link = next(link for link in world.links if link.sequences)
    handle = next(iter(link.sequences))
    world.step(link, [handle])
    busy = common_pb2.Error(code=common_pb2.ERROR_CODE_OVERLOADED, retryable=True)
    world.send(link, refusal=common_pb2.Refusal(handle=handle, error=busy))
    assert world.sink.over[1].reason == common_pb2.FINISH_REASON_ERROR
    assert world.sink.over[1].usage.completion_tokens == 1
    world.check_idle()


def test_an_abort_before_the_submit_was_sent_never_reaches_the_engine():
    world = World()
    link = world.attach()
    world.submit(1)
    world.dispatcher.abort(world.sequences[1], AbortCause.CLIENT, answer=True)
    assert world.sink.over[1].reason == common_pb2.FINISH_REASON_ABORT
    assert world.sink.answers == [(1, common_pb2.ABORT_OUTCOME_ABORTED)]
    assert link.pop() is None
    world.check_idle()


def test_usage_of_a_replayed_sequence_counts_from_the_prompt():
    world = World()
    link = world.attach()
    spec = common_pb2.SequenceSpec(model="m", token_ids=[1] * 10, prompt_len=4)
    world.sequences[1] = world.dispatcher.submit(1, spec, world.sink)
    world.step(link, list(link.sequences))
    world.membership.leave(link, LossReason.STREAM_ENDED)
    usage = world.sink.over[1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (4, 7)


def test_what_no_engine_takes_is_not_even_placed():
    world = World()
    link = world.attach()
    placed = []
    place = world.placer.place
    world.placer.place = lambda request, **kw: placed.append(request) or place(request, **kw)
    error = world.submit(1, tokens=65)
    assert (error.code, error.param) == (common_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED, "prompt")
    assert not placed
    # Whether something is left to generate is the engine's to say.
    assert world.submit(2, tokens=64) is None
    assert len(link.sequences) == len(placed) == 1
    world.membership.leave(link, LossReason.STREAM_ENDED)
    world.check_idle()


def test_the_metrics_name_what_happened():
    world = World()
    link = world.attach()
    world.submit(1)
    world.submit(2, tokens=101)
    world.step(link, list(link.sequences), ends=True)
    world.submit(3)
    world.dispatcher.abandon(world.sequences[3], AbortCause.SLOW_READER)
    world.membership.leave(link, LossReason.LEASE_EXPIRED)
    read = world.metrics.registry.get_sample_value
    assert read("catenary_router_submits_total") == 3
    assert read("catenary_router_refusals_total", {"code": "context_length_exceeded"}) == 1
    assert read("catenary_router_ends_total", {"reason": "stop"}) == 1
    assert read("catenary_router_aborts_total", {"cause": "slow_reader"}) == 1
    assert read("catenary_router_engine_losses_total", {"reason": "lease_expired"}) == 1


async def test_a_plain_call_counts_as_resumed_once_it_goes_on():
    world = World()
    world.attach("a")
    spec = common_pb2.SequenceSpec(model="m", token_ids=[1, 2])
    resumed = []
    call = PlainCall(world.dispatcher, spec, ResumePolicy(first_delay_s=0.001), resumed.append)
    world.attach("b")
    world.membership.leave(next(link for link in world.links if link.sequences), LossReason.STREAM_ENDED)
    assert resumed == []
    await eventually(lambda: any(link.sequences for link in world.links), "its next life")
    assert resumed == [Cause.ENGINE_LOST]
    # This router takes nothing any more, so that it ends with its engine.
    world.admission.drain()
    world.membership.leave(next(link for link in world.links if link.sequences), LossReason.STREAM_ENDED)
    with pytest.raises(Refused):
        await anext(call.messages())
    assert resumed == [Cause.ENGINE_LOST]
    world.check_idle()


@pytest.mark.parametrize("reason", LossReason)
def test_only_engines_that_died_speak_against_what_they_computed_alone(reason):
    world = World()
    link = world.attach()
    assert world.submit(1, quarantined=True, resumed=True) is None
    world.membership.leave(link, reason)
    in_order = reason in (LossReason.REPLACED, LossReason.ROUTER_STOPPED)
    error = world.sink.over[1].error
    assert error.code == (common_pb2.ERROR_CODE_DRAINING if in_order else common_pb2.ERROR_CODE_POISONED)
    assert error.retryable == in_order
