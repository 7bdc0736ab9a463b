"""A sequence in two halves of which one fails, is aborted or finds nobody."""

from __future__ import annotations

import pytest

from catenary.columns import MalformedStep
from catenary.v1 import common_pb2
from services.router.dispatch import AbortCause, LossReason
from tests.support.split import (
    ABORT,
    BOTH,
    BROKEN,
    BUSY,
    LONG,
    PREFILL,
    SHORT,
    STOP,
    World,
    offer,
    prompt_part,
    world,
)

__all__ = ["world"]

LOST = common_pb2.ERROR_CODE_ENGINE_LOST
BAD_ENDS = {
    "no offer": {},
    "an offer of too few tokens": {"kv_offer": offer(tokens=7)},
    "a short ticket": {"kv_offer": offer(ticket=b"x")},
    "a long address": {"kv_offer": offer(address="x" * 513)},
    "no connector": {"kv_offer": offer(connector="")},
    "too many blocks": {"kv_offer": offer(blocks=LONG)},
    "an error": {"reason": common_pb2.FINISH_REASON_ERROR, "error": BROKEN},
    "a length": {"reason": common_pb2.FINISH_REASON_LENGTH, "kv_offer": offer()},
    "an abort": {"reason": ABORT},
}


@pytest.mark.parametrize("name", BAD_ENDS)
def test_a_prefill_that_fails_is_computed_by_the_decode_engine(world, name):
    submit = prompt_part(world)
    world.end(world.prefill, submit.handle, **BAD_ENDS[name])
    (second,) = world.submits(world.decode)
    assert not second.HasField("kv_offer")
    assert world.count("failed") == 1
    world.end(world.decode, second.handle)
    assert world.sink.over[1].reason == STOP
    world.check_idle()


@pytest.mark.parametrize("error", [BUSY, BROKEN])
def test_a_prefill_that_is_refused_is_placed_whole(world, error):
    submit = prompt_part(world)
    world.send(world.prefill, refusal=common_pb2.Refusal(handle=submit.handle, error=error))
    (second,) = world.submits(world.decode)
    assert not second.HasField("kv_offer")
    assert world.count("refused") == 1


def test_the_first_engine_is_lost_or_stalls(world):
    """Whoever resumes the sequence counts that as a death; it goes on whole."""
    prompt_part(world)
    world.membership.leave(world.prefill, LossReason.LEASE_EXPIRED)
    assert world.sink.over[1].error.code == LOST
    world.prefill = world.attach("p", PREFILL)
    submit = prompt_part(world, 2)
    lost = common_pb2.Error(code=LOST, retryable=True)
    world.dispatcher.give_up(world.prefill, lost, AbortCause.STALLED)
    assert world.sink.over[2].error == lost
    (abort,) = world.sent(world.prefill)
    assert abort.abort.handle == submit.handle
    # What it says of it later is nobody's.
    world.end(world.prefill, submit.handle, kv_offer=offer())
    submit = prompt_part(world, 3)
    world.end(world.prefill, submit.handle, reason=common_pb2.FINISH_REASON_ERROR, error=lost)
    assert world.sink.over[3].error.code == LOST
    assert world.count("lost") == 3
    assert world.submit(4, resumed=True) is None
    (again,) = world.submits(world.decode)
    assert not again.prefill_only
    assert not again.HasField("kv_offer")
    world.end(world.decode, again.handle)
    world.check_idle()


def test_nobody_died_where_the_first_engine_comes_back(world):
    prompt_part(world)
    world.prefill = world.attach("p", PREFILL)
    assert world.sink.over[1].error.code == common_pb2.ERROR_CODE_DRAINING
    world.check_idle()


def test_the_second_engine_is_lost_before_anybody_saw_a_token(world):
    submit = prompt_part(world)
    world.end(world.prefill, submit.handle, kv_offer=offer())
    world.submits(world.decode)
    world.membership.leave(world.decode, LossReason.STREAM_ENDED)
    assert world.sink.over[1].error.code == LOST
    assert world.count("lost") == 1
    (withdrawal,) = world.sent(world.prefill)
    assert withdrawal.abort.handle == submit.handle
    world.check_idle()


def test_tokens_of_a_prefill_engine_break_the_contract(world):
    submit = prompt_part(world)
    step = common_pb2.StepOutput(handles=[submit.handle], token_counts=[1], token_ids=[5])
    with pytest.raises(MalformedStep):
        world.send(world.prefill, step=step)


def test_an_abort_reaches_the_engine_of_the_part_that_runs(world):
    submit = prompt_part(world)
    world.dispatcher.abort(world.sequences[1], AbortCause.CLIENT)
    (abort,) = world.sent(world.prefill)
    assert abort.abort.handle == submit.handle
    # The offer was on its way: the engine withdraws it when the abort comes.
    world.end(world.prefill, submit.handle, kv_offer=offer())
    assert world.sink.over[1].reason == ABORT
    submit = prompt_part(world, 2)
    world.end(world.prefill, submit.handle, kv_offer=offer())
    (second,) = world.submits(world.decode)
    world.dispatcher.abort(world.sequences[2], AbortCause.CLIENT)
    (abort,) = world.sent(world.decode)
    assert abort.abort.handle == second.handle
    world.end(world.decode, second.handle, reason=ABORT)
    (withdrawal,) = world.sent(world.prefill)
    assert withdrawal.abort.handle == submit.handle
    world.check_idle()


def test_an_offer_without_an_engine_to_fetch_it_is_withdrawn(world):
    other = world.attach("b", BOTH)
    submit = prompt_part(world)
    world.membership.leave(world.decode, LossReason.STREAM_ENDED)
    world.end(world.prefill, submit.handle, kv_offer=offer())
    (second,) = world.submits(other)
    assert not second.HasField("kv_offer")
    assert world.count("recomputed") == 1
    (withdrawal,) = world.sent(world.prefill)
    assert withdrawal.abort.handle == submit.handle


def test_no_part_begins_anew_in_a_router_that_ends(world):
    submit = prompt_part(world)
    assert world.submit(2, leader=1) is None
    over = common_pb2.Error(code=common_pb2.ERROR_CODE_DRAINING, message="over", retryable=True)
    world.dispatcher.lifecycle.close(over)
    assert not world.sink.over
    world.membership.give_up_all(over)
    assert world.sink.over[1].error == over
    world.end(world.prefill, submit.handle, reason=ABORT)
    world.tick()
    assert world.sink.over[2] == over
    assert world.submits(world.decode) == []
    world.check_idle()


def test_no_sequence_overtakes_where_no_engine_can_be_reserved():
    world = World()
    engines = [world.attach(name, PREFILL) for name in "pq"]
    for handle in range(4):
        assert world.submit(handle, SHORT) is None
    assert [len(link.sequences) for link in engines] == [2, 2]
    assert world.submit(4, SHORT, beam_search=common_pb2.BeamSearch(width=3, results=1)) is None
    assert world.submit(5, SHORT) is None
    world.tick()
    assert [len(link.sequences) for link in engines] == [2, 2]
    world.end(engines[0], next(iter(engines[0].sequences)))
    world.tick()
    assert 4 in [sequence.handle for sequence in engines[0].sequences.values()]
