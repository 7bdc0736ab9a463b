"""What waits in the dispatcher: for room, for its turn, and for how long."""

from __future__ import annotations

from dataclasses import replace

import pytest

from catenary.v1 import common_pb2
from services.router.dispatch import AbortCause, LossReason
from tests.support.dispatcher import MAX_WAIT_S, QUEUES, World


def test_what_finds_no_room_waits_in_order_until_there_is_some():
    world = World(backlog=0)
    link = world.attach()
    for handle in range(6):
        assert world.submit(handle) is None
    assert len(world.dispatcher.lifecycle.queues) == 3
    assert world.submit(6) is None
    full = world.submit(7)
    assert (full.code, full.retry_after_ms) == (common_pb2.ERROR_CODE_OVERLOADED, 10)
    assert "lane-sequences" in full.message
    assert world.submit(8, resumed=True) is None
    assert len(link.sequences) == 3
    world.step(link, list(link.sequences)[:2], ends=True)
    world.tick()
    assert [s.handle for s in link.sequences.values()] == [2, 8, 3]
    world.dispatcher.abort(world.sequences[4], AbortCause.CLIENT, answer=True)
    assert world.sink.over[4].reason == common_pb2.FINISH_REASON_ABORT
    assert world.sink.answers == [(4, common_pb2.ABORT_OUTCOME_ABORTED)]
    world.attach("b")
    world.tick()
    assert len(world.dispatcher.lifecycle.queues) == 0
    world.check_counts()


def test_a_wait_has_an_end():
    world = World(backlog=0)
    link = world.attach()
    for handle in range(3):
        world.submit(handle)
    world.submit(3)
    world.submit(4, max_wait_ms=5000)
    world.now = 5.0
    world.dispatcher.lifecycle.tick()
    assert world.sink.over.keys() == {4}
    world.now = MAX_WAIT_S
    world.dispatcher.lifecycle.tick()
    for handle, seconds in ((3, "20"), (4, "5")):
        assert world.sink.over[handle].code == common_pb2.ERROR_CODE_TIMEOUT
        assert world.sink.over[handle].retryable
        assert f"within {seconds} seconds" in world.sink.over[handle].message
    world.membership.leave(link, LossReason.STREAM_ENDED)
    world.check_idle()


def test_engines_that_are_full_serve_however_short_their_absence_may_be():
    world = World(backlog=0, queues=replace(QUEUES, unserved_s=0))
    link = world.attach()
    world.dispatcher.lifecycle.tick()
    world.now += 0.05
    for handle in range(3):
        world.submit(handle)
    assert world.submit(3) is None
    assert len(world.dispatcher.lifecycle.queues) == 1
    world.membership.leave(link, LossReason.STREAM_ENDED)
    world.dispatcher.lifecycle.fleet_changed()
    world.tick()
    assert world.submit(4).code == common_pb2.ERROR_CODE_UNAVAILABLE


WIDE = {"beam_search": common_pb2.BeamSearch(width=3, results=1)}


def test_a_sequence_that_needs_more_room_holds_up_one_engine_and_not_the_others():
    world = World(backlog=0, queues=replace(QUEUES, sequences=(6,) * 4))
    kept, other = world.attach("a"), world.attach("b")
    for handle in (0, 1):
        world.submit(handle)
    for handle, fields in ((2, WIDE), (3, {}), (4, {}), (5, {})):
        assert world.submit(handle, **fields) is None
    world.tick()
    # Two places are left on each.
    if kept.engine.reserved_for is None:
        kept, other = other, kept
    assert [s.handle for s in other.sequences.values()][1:] == [3, 4]
    assert len(kept.sequences) == 1
    assert kept.engine.reserved_for is world.sequences[2].request
    world.step(kept, list(kept.sequences), ends=True)
    world.tick()
    assert [s.handle for s in kept.sequences.values()] == [2]
    assert kept.engine.reserved_for is other.engine.reserved_for is None
    world.step(other, list(other.sequences)[:1], ends=True)
    world.tick()
    assert [s.handle for s in other.sequences.values()] == [3, 4, 5]


def test_many_that_need_too_much_hold_up_no_more_than_one():
    world = World(backlog=0, queues=replace(QUEUES, sequences=(100,) * 4), live=100)
    links = world.attach("a"), world.attach("b")
    for handle in range(2):
        world.submit(handle)
    for handle in range(2, 22):
        assert world.submit(handle, **WIDE) is None
    assert world.submit(22) is None
    world.tick()
    assert sorted(len(link.sequences) for link in links) == [1, 2]


@pytest.mark.parametrize("how", ["abort", "wait", "loss", "breaker"])
def test_an_engine_is_kept_no_longer_than_somebody_waits_for_it(how):
    world = World(backlog=0)
    links = world.attach("a"), world.attach("b")
    for handle, fields in ((0, {}), (1, {}), (2, WIDE)):
        world.submit(handle, **fields)
    world.tick()
    (kept,) = (link for link in links if link.engine.reserved_for is not None)
    (other,) = (link for link in links if link is not kept)
    if how == "abort":
        world.dispatcher.abort(world.sequences[2], AbortCause.CLIENT)
    elif how == "wait":
        world.now += MAX_WAIT_S
        world.dispatcher.lifecycle.tick()
    elif how == "loss":
        world.membership.leave(kept, LossReason.STREAM_ENDED)
        world.links.remove(kept)
        world.dispatcher.lifecycle.tick()
        assert other.engine.reserved_for is world.sequences[2].request
        world.step(other, list(other.sequences), ends=True)
        world.tick()
        assert [s.handle for s in other.sequences.values()] == [2]
    else:
        for _ in range(3):
            world.health.failed(kept.engine)
        world.dispatcher.lifecycle.tick()
        assert other.engine.reserved_for is world.sequences[2].request
        world.dispatcher.abort(world.sequences[2], AbortCause.CLIENT)
    assert kept.engine.reserved_for is None or how == "loss"
    assert other.engine.reserved_for is None


def test_when_an_engine_comes_is_not_told_by_how_fast_a_queue_emptied():
    world = World(backlog=0)
    link = world.attach()
    for handle in range(5):
        world.submit(handle)
    world.now += 2.0
    world.membership.leave(link, LossReason.STREAM_ENDED)
    world.dispatcher.lifecycle.fleet_changed()
    world.tick()
    world.now += MAX_WAIT_S
    newcomer = world.submit(5)
    world.dispatcher.lifecycle.tick()
    # Whoever is told a minute would give up in place of waiting for the engine.
    for error in (newcomer, world.sink.over[3], world.sink.over[4]):
        assert error.code == common_pb2.ERROR_CODE_UNAVAILABLE
        assert error.retry_after_ms == QUEUES.retry_after_ms


def test_sequences_for_engines_of_their_own_take_turns_within_the_bounds_of_their_lane():
    world = World()
    link = world.attach()
    world.submit(0)
    for handle in range(1, 5):
        assert world.submit(handle, quarantined=True) is None
    assert "lane-sequences" in world.submit(5, quarantined=True).message
    assert world.submit(6, quarantined=True, resumed=True) is None
    tried = []
    place = world.placer.place
    world.placer.place = lambda request, **kw: tried.append(request) or place(request, **kw)
    world.tick()
    assert len(tried) == 1
    # Whoever gives up his turn leaves it to the next one.
    world.dispatcher.abort(world.sequences[1], AbortCause.CLIENT)
    for handle in (0, 2, 3, 4, 6):
        assert [s.handle for s in link.sequences.values()] == [handle]
        world.step(link, list(link.sequences), ends=True)
        world.tick()
    world.check_idle()
    assert not link.engine.reserved_for


def test_nothing_waits_in_a_router_that_drains():
    world = World(backlog=0)
    link, other = world.attach("a"), world.attach("b")
    for handle in range(7):
        world.submit(handle)
    assert len(world.dispatcher.lifecycle.queues) == 1
    over = common_pb2.Error(code=common_pb2.ERROR_CODE_DRAINING, message="over", retryable=True)
    world.admission.drain()
    world.dispatcher.lifecycle.close(over)
    assert world.sink.over == {6: over}
    # What comes back from an engine goes to another router, too, if no other engine has room.
    busy = common_pb2.Error(code=common_pb2.ERROR_CODE_OVERLOADED, message="busy", retryable=True)
    (first, *_), (handle, *_) = link.sequences.values(), link.sequences
    world.send(link, refusal=common_pb2.Refusal(handle=handle, error=busy))
    assert world.sink.over[first.handle] == over
    bad = common_pb2.Error(code=common_pb2.ERROR_CODE_INVALID_ARGUMENT, message="bad")
    (second, *_), (handle, *_) = other.sequences.values(), other.sequences
    world.send(other, refusal=common_pb2.Refusal(handle=handle, error=bad))
    assert world.sink.over[second.handle] == bad
    world.membership.give_up_all(over)
    for each in (link, other):
        world.membership.leave(each, LossReason.ROUTER_STOPPED)
    world.tick()
    world.check_idle()
