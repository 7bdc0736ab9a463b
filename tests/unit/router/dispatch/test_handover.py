"""Sequences of which one engine computes the prompt and another one the rest: which ones, and their waits."""

from __future__ import annotations

import pytest

from catenary.v1 import common_pb2
from services.router.dispatch import AbortCause
from tests.support.split import ABORT, BOTH, DECODE, LONG, PREFILL, SHORT, World, offer, prompt_part, world

__all__ = ["world"]


def test_a_long_prompt_takes_both_ways_as_one_sequence(world):
    submit = prompt_part(world)
    usage = common_pb2.Usage(cached_tokens=16)
    world.end(world.prefill, submit.handle, kv_offer=offer(), usage=usage)
    assert not world.sink.over
    assert world.admission.live_sequences == 1
    assert world.prefill.engine.placed_sequences == 0
    (second,) = world.submits(world.decode)
    assert (second.kv_offer, second.prefill_only) == (offer(), False)
    assert second.spec == submit.spec
    used = common_pb2.Usage(transferred_tokens=LONG - 1)
    world.end(world.decode, second.handle, usage=used, kv_offer=offer())
    end = world.sink.over[1]
    assert (end.usage.transferred_tokens, end.usage.cached_tokens) == (LONG - 1, 16)
    assert not end.HasField("kv_offer")
    assert (world.count("begun"), world.count("offered"), world.count("done")) == (1, 1, 1)
    # With the first token the first engine learns that nobody asks for it any more.
    assert [one.abort.handle for one in world.sent(world.prefill)] == [submit.handle]
    world.check_idle()


@pytest.mark.parametrize(
    "fields",
    [
        {"tokens": SHORT},
        {"response": common_pb2.ResponseOptions(prompt_logprobs=1)},
        {"beam_search": common_pb2.BeamSearch(width=2, results=1)},
        {"prompt_len": 20},
        {"resumed": True},
    ],
)
def test_what_is_not_divided_goes_where_it_is_generated(world, fields):
    assert world.submit(1, **fields) is None
    assert world.submits(world.prefill) == []
    (submit,) = world.submits(world.decode)
    assert not submit.prefill_only
    assert not submit.HasField("kv_offer")


@pytest.mark.parametrize("roles", [(PREFILL, BOTH), (BOTH, DECODE), (DECODE,), (BOTH,)])
def test_without_both_roles_one_engine_computes_all(roles):
    world = World()
    links = [world.attach(str(number), role) for number, role in enumerate(roles)]
    world.submit(1)
    (submit,) = [submit for link in links for submit in world.submits(link)]
    assert not submit.prefill_only


def test_where_there_are_only_engines_for_prompts_they_compute_all():
    world = World()
    link = world.attach("p", PREFILL)
    world.submit(1)
    (submit,) = world.submits(link)
    assert not submit.prefill_only
    world.end(link, submit.handle)
    world.check_idle()
    assert world.fleet.served_models()[0].serving_engines == 1
    world.attach("d", DECODE)
    assert world.fleet.served_models()[0].serving_engines == 1


def test_between_the_parts_a_sequence_waits_for_room_with_its_offer(world):
    submit, other = prompt_part(world), prompt_part(world, 2)
    for handle in range(10, 14):
        assert world.submit(handle, SHORT) is None
    shorts = world.submits(world.decode)
    assert len(shorts) == 4
    world.end(world.prefill, submit.handle, kv_offer=offer())
    assert world.submits(world.decode) == []
    assert len(world.dispatcher.lifecycle.queues) == 1
    world.end(world.decode, shorts[0].handle)
    world.tick()
    (second,) = world.submits(world.decode)
    assert second.kv_offer == offer()
    # One that is aborted there leaves nothing behind.
    world.end(world.prefill, other.handle, kv_offer=offer())
    assert len(world.dispatcher.lifecycle.queues) == 1
    world.dispatcher.abort(world.sequences[2], AbortCause.CLIENT)
    (withdrawal,) = world.sent(world.prefill)
    assert withdrawal.abort.handle == other.handle
    assert world.sink.over[2].reason == ABORT


def test_offers_do_not_pile_up_where_nobody_takes_them(world):
    for handle in range(4):
        assert world.submit(10 + handle, SHORT) is None
    assert len(world.submits(world.decode)) == 4
    assert world.submit(1) is None
    assert world.submits(world.prefill) == []
    assert len(world.dispatcher.lifecycle.queues) == 1


def test_samples_of_one_prompt_follow_their_leader(world):
    second_decoder = world.attach("e", DECODE)
    submit = prompt_part(world)
    for handle in (2, 3, 4):
        assert world.submit(handle, leader=1) is None
    assert world.submits(world.decode) + world.submits(second_decoder) == []
    world.dispatcher.abort(world.sequences[4], AbortCause.CLIENT)
    assert world.sink.over[4].reason == ABORT
    world.end(world.prefill, submit.handle, kv_offer=offer())
    world.tick()
    links = [link for link in (world.decode, second_decoder) if link.sequences]
    assert len(links) == 1
    leader, *followers = world.submits(links[0])
    assert leader.HasField("kv_offer")
    assert [(one.same_prompt_as, one.HasField("kv_offer")) for one in followers] == [
        (leader.handle, False)
    ] * 2


def test_followers_of_a_leader_that_ends_are_placed(world):
    submit = prompt_part(world)
    assert world.submit(2, leader=1) is None
    world.dispatcher.abort(world.sequences[1], AbortCause.CLIENT)
    world.end(world.prefill, submit.handle, reason=ABORT)
    world.tick()
    (alone,) = world.submits(world.decode)
    assert not alone.HasField("same_prompt_as")
