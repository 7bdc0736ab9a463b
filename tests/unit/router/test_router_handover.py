"""Sequences of which one engine computes the prompt and another one the rest, whatever happens."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from catenary.columns import MalformedStep, StepRow
from catenary.resume import PoisonedRequests
from catenary.schema import MINIMUM_PEER_REVISION, SCHEMA_REVISION
from catenary.v1 import common_pb2, engine_pb2
from services.router.admission import Admission, AdmissionLimits, QueueOptions, Refused, SpecLimits
from services.router.dispatch import (
    AbortCause,
    Dispatcher,
    EngineHealth,
    LossReason,
    Membership,
    PoisonBook,
)
from services.router.fleet import Fleet
from services.router.metrics import RouterMetrics
from services.router.placement import HalvesPlacer, LeastLoaded

BOTH, PREFILL, DECODE = (
    engine_pb2.ENGINE_ROLE_BOTH,
    engine_pb2.ENGINE_ROLE_PREFILL,
    engine_pb2.ENGINE_ROLE_DECODE,
)
LONG, SHORT = 40, 5
MAX_WAIT_S = 20.0
STOP, ABORT = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_ABORT
BUSY = common_pb2.Error(code=common_pb2.ERROR_CODE_OVERLOADED, message="busy", retryable=True)
BROKEN = common_pb2.Error(code=common_pb2.ERROR_CODE_INTERNAL, message="broken", retryable=True)


class Sink:
    """Remembers, and fails on what a sink must never see."""

    def __init__(self) -> None:
        self.rows: dict[int, StepRow] = {}
        self.over: dict[int, object] = {}

    def row(self, handle):
        assert handle not in self.over
        return self.rows.setdefault(handle, StepRow(handle))

    def end(self, handle, end):
        assert handle not in self.over
        self.over[handle] = end

    def refuse(self, handle, error):
        assert handle not in self.over
        assert handle not in self.rows
        self.over[handle] = error

    def abort_result(self, handle, outcome):
        pass


class World:
    """A dispatcher over engines that the test plays."""

    def __init__(self) -> None:
        self.now = 0.0
        self.due = []
        self.fleet = Fleet(lease_s=5, backlog=1)
        self.admission = Admission(AdmissionLimits(16, 4000, retry_after_ms=10))
        self.metrics = RouterMetrics(CollectorRegistry())
        health = EngineHealth(self.metrics, on_change=lambda: None, clock=lambda: self.now)
        placer = HalvesPlacer(
            self.fleet, LeastLoaded(random.Random(0)), min_handover_tokens=16, retry_after_ms=10
        )
        queues = QueueOptions((8,) * 4, (4000,) * 4, (MAX_WAIT_S,) * 4, (), 8, 10, 10)
        self.dispatcher = Dispatcher(
            self.admission,
            placer,
            self.metrics,
            health,
            poison=PoisonBook(PoisonedRequests(limit=8, ttl_s=60, clock=lambda: self.now), lambda: None),
            spec_limits=SpecLimits(1000),
            queue_options=queues,
            abort_timeout_s=30,
            clock=lambda: self.now,
            call_soon=self.due.append,
        )
        self.membership = Membership(
            self.fleet,
            self.dispatcher,
            self.metrics,
            health,
            max_engines=8,
            on_change=self.dispatcher.intake.fleet_changed,
            clock=lambda: self.now,
        )
        self.sink = Sink()
        self.sequences = {}
        self.links = {}

    def attach(self, name, role):
        hello = engine_pb2.EngineHello(
            schema_revision=SCHEMA_REVISION,
            minimum_peer_revision=MINIMUM_PEER_REVISION,
            instance_id=name,
            engine_name=name,
            model=common_pb2.ModelInfo(name="m", max_model_len=64, vocab_size=100),
            capacity=engine_pb2.Capacity(block_size=16, total_blocks=64, max_running=3, max_waiting=3),
            state=engine_pb2.ENGINE_STATE_SERVING,
            role=role,
        )
        link = self.links[name] = self.membership.attach(hello)
        return link

    def submit(self, handle, tokens=LONG, *, leader=None, resumed=False, **fields):
        spec = common_pb2.SequenceSpec(model="m", token_ids=[1] * tokens, **fields)
        try:
            self.sequences[handle] = self.dispatcher.submit(
                handle, spec, self.sink, same_prompt_as=self.sequences.get(leader), resumed=resumed
            )
        except Refused as refusal:
            return refusal.error
        return None

    def tick(self):
        due, self.due[:] = list(self.due), []
        for call in due:
            call()

    def sent(self, link):
        """What the link's engine is sent."""
        found = []
        while (message := link._next()) is not None:
            found.append(message)
        return found

    def submits(self, link):
        return [message.submit for message in self.sent(link) if message.HasField("submit")]

    def send(self, link, **payload):
        self.membership.receive(link, engine_pb2.AttachRequest(lease_epoch=link.engine.epoch, **payload))

    def end(self, link, handle, **fields):
        end = common_pb2.SequenceEnd(row=0, **{"reason": STOP, **fields})
        self.send(link, step=common_pb2.StepOutput(handles=[handle], token_counts=[0], ends=[end]))

    def count(self, result):
        return self.metrics._registry.get_sample_value("catenary_router_handovers_total", {"result": result})

    def check_idle(self):
        assert self.admission.live_sequences == self.admission.live_tokens == 0
        assert all(engine.placed_sequences == engine.placed_tokens == 0 for engine in self.fleet)
        assert self.sequences.keys() == self.sink.over.keys()
        assert all(not link.sequences for link in self.links.values())


def offer(tokens=LONG, **fields):
    values = {"connector": "shm", "ticket": b"t" * 32, "tokens": tokens - 1, "blocks": 3, "address": "/a"}
    return common_pb2.KvOffer(**{**values, **fields})


@pytest.fixture
def world():
    world = World()
    world.prefill, world.decode = world.attach("p", PREFILL), world.attach("d", DECODE)
    return world


def first_half(world, handle=1, **fields):
    """Submits a long prompt; returns what its first engine is sent."""
    assert world.submit(handle, **fields) is None
    (submit,) = world.submits(world.prefill)
    assert submit.prefill_only
    assert world.submits(world.decode) == []
    return submit


def test_a_long_prompt_takes_both_ways_as_one_sequence(world):
    submit = first_half(world)
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
    # What was fetched needs no withdrawal.
    assert world.sent(world.prefill) == []
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
def test_a_first_half_that_fails_is_computed_with_the_second(world, name):
    submit = first_half(world)
    world.end(world.prefill, submit.handle, **BAD_ENDS[name])
    (second,) = world.submits(world.decode)
    assert not second.HasField("kv_offer")
    assert world.count("failed") == 1
    world.end(world.decode, second.handle)
    assert world.sink.over[1].reason == STOP
    world.check_idle()


@pytest.mark.parametrize("error", [BUSY, BROKEN])
def test_a_first_half_that_is_refused_goes_on_whole(world, error):
    submit = first_half(world)
    world.send(world.prefill, refusal=common_pb2.Refusal(handle=submit.handle, error=error))
    (second,) = world.submits(world.decode)
    assert not second.HasField("kv_offer")
    assert world.count("refused") == 1


def test_the_first_engine_is_lost_or_stalls(world):
    first_half(world)
    world.membership.leave(world.prefill, LossReason.LEASE_EXPIRED)
    (second,) = world.submits(world.decode)
    assert not second.HasField("kv_offer")
    world.end(world.decode, second.handle)
    assert world.sink.over[1].reason == STOP
    world.prefill = world.attach("p", PREFILL)
    submit = first_half(world, 2)
    lost = common_pb2.Error(code=common_pb2.ERROR_CODE_ENGINE_LOST, retryable=True)
    world.dispatcher.give_up(world.prefill, lost, AbortCause.STALLED)
    (third,) = world.submits(world.decode)
    (abort,) = world.sent(world.prefill)
    assert abort.abort.handle == submit.handle
    # What it says of it later is nobody's.
    world.end(world.prefill, submit.handle, kv_offer=offer())
    world.end(world.decode, third.handle)
    assert world.count("lost") == 2
    world.check_idle()


def test_the_second_engine_is_lost_before_anybody_saw_a_token(world):
    submit = first_half(world)
    world.end(world.prefill, submit.handle, kv_offer=offer())
    world.submits(world.decode)
    other = world.attach("e", DECODE)
    world.membership.leave(world.decode, LossReason.STREAM_ENDED)
    (again,) = world.submits(other)
    assert not again.HasField("kv_offer")
    step = common_pb2.StepOutput(handles=[again.handle], token_counts=[1], token_ids=[5])
    world.send(other, step=step)
    world.membership.leave(other, LossReason.STREAM_ENDED)
    assert world.sink.over[1].error.code == common_pb2.ERROR_CODE_ENGINE_LOST
    world.check_idle()


def test_tokens_of_a_first_half_break_the_contract(world):
    submit = first_half(world)
    step = common_pb2.StepOutput(handles=[submit.handle], token_counts=[1], token_ids=[5])
    with pytest.raises(MalformedStep):
        world.send(world.prefill, step=step)


def test_an_abort_reaches_the_half_that_it_is_in(world):
    submit = first_half(world)
    world.dispatcher.abort(world.sequences[1], AbortCause.CLIENT)
    (abort,) = world.sent(world.prefill)
    assert abort.abort.handle == submit.handle
    # The offer was on its way: the engine withdraws it when the abort comes.
    world.end(world.prefill, submit.handle, kv_offer=offer())
    assert world.sink.over[1].reason == ABORT
    submit = first_half(world, 2)
    world.end(world.prefill, submit.handle, kv_offer=offer())
    (second,) = world.submits(world.decode)
    world.dispatcher.abort(world.sequences[2], AbortCause.CLIENT)
    (abort,) = world.sent(world.decode)
    assert abort.abort.handle == second.handle
    world.end(world.decode, second.handle, reason=ABORT)
    (withdrawal,) = world.sent(world.prefill)
    assert withdrawal.abort.handle == submit.handle
    world.check_idle()


def test_between_the_halves_it_waits_for_room_with_its_offer(world):
    submit, other = first_half(world), first_half(world, 2)
    for handle in range(10, 14):
        assert world.submit(handle, SHORT) is None
    shorts = world.submits(world.decode)
    assert len(shorts) == 4
    world.end(world.prefill, submit.handle, kv_offer=offer())
    assert world.submits(world.decode) == []
    assert len(world.dispatcher.intake.room) == 1
    world.end(world.decode, shorts[0].handle)
    world.tick()
    (second,) = world.submits(world.decode)
    assert second.kv_offer == offer()
    # One that is aborted there leaves nothing behind.
    world.end(world.prefill, other.handle, kv_offer=offer())
    assert len(world.dispatcher.intake.room) == 1
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
    assert len(world.dispatcher.intake.room) == 1


def test_an_offer_without_an_engine_to_fetch_it_is_withdrawn(world):
    other = world.attach("b", BOTH)
    submit = first_half(world)
    world.membership.leave(world.decode, LossReason.STREAM_ENDED)
    world.end(world.prefill, submit.handle, kv_offer=offer())
    (second,) = world.submits(other)
    assert not second.HasField("kv_offer")
    assert world.count("recomputed") == 1
    (withdrawal,) = world.sent(world.prefill)
    assert withdrawal.abort.handle == submit.handle


def test_samples_of_one_prompt_follow_their_leader(world):
    second_decoder = world.attach("e", DECODE)
    submit = first_half(world)
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


def test_followers_of_a_leader_that_ends_go_on(world):
    submit = first_half(world)
    assert world.submit(2, leader=1) is None
    world.dispatcher.abort(world.sequences[1], AbortCause.CLIENT)
    world.end(world.prefill, submit.handle, reason=ABORT)
    world.tick()
    (alone,) = world.submits(world.decode)
    assert not alone.HasField("same_prompt_as")


def test_no_half_begins_anew_in_a_router_that_ends(world):
    submit = first_half(world)
    assert world.submit(2, leader=1) is None
    over = common_pb2.Error(code=common_pb2.ERROR_CODE_DRAINING, message="over", retryable=True)
    world.dispatcher.intake.close(over)
    assert not world.sink.over
    world.membership.give_up_all(over)
    assert world.sink.over[1].error == over
    world.end(world.prefill, submit.handle, reason=ABORT)
    world.tick()
    assert world.sink.over[2] == over
    assert world.submits(world.decode) == []
    world.check_idle()


events = st.lists(
    st.tuples(
        st.sampled_from(
            ["attach", "leave", "tick", "wait", "report", "stall", "finish"]
            + ["submit", "follow", "abort", "offer", "offer", "fail", "refuse", "token"] * 2
        ),
        st.integers(0, 11),
    ),
    max_size=60,
)


def play(world: World, what: str, number: int, gone: set[int]) -> None:
    links = [link for link in world.links.values() if not link.closed]
    link = links[number % len(links)] if links else None
    sequence = world.sequences.get(number)
    match what:
        case "attach":
            world.attach("pqdb"[number % 4], (PREFILL, PREFILL, DECODE, BOTH)[number % 4])
        case "submit" if number not in world.sequences:
            world.submit(number, (LONG, SHORT)[number % 4 == 3])
        case "follow" if number not in world.sequences:
            world.submit(number, leader=number - 1)
        case "tick":
            world.tick()
        case "wait":
            world.now += MAX_WAIT_S * 0.3
            world.dispatcher.intake.tick()
            world.dispatcher.sweep()
        case "abort" if sequence is not None:
            world.dispatcher.abort(sequence, AbortCause.CLIENT)
        case "leave" if link is not None:
            world.membership.leave(link, LossReason.STREAM_ENDED)
        case "stall" if link is not None:
            world.dispatcher.give_up(link, BROKEN, AbortCause.STALLED)
        case "report" if link is not None:
            load = engine_pb2.LoadReport(sequence=number, state=engine_pb2.ENGINE_STATE_SERVING)
            world.send(link, load=load)
        case _ if link is not None and link.sequences:
            answer(world, link, what, list(link.sequences)[number % len(link.sequences)])


def answer(world: World, link, what: str, handle: int) -> None:
    half = link.sequences[handle].request.placed.name
    match what:
        case "offer":
            world.end(link, handle, kv_offer=offer(), usage=common_pb2.Usage(transferred_tokens=39))
        case "finish":
            world.end(link, handle)
        case "fail":
            world.end(link, handle, reason=common_pb2.FINISH_REASON_ERROR, error=BROKEN)
        case "refuse":
            world.send(link, refusal=common_pb2.Refusal(handle=handle, error=BUSY))
        case "token" if half != "PROMPT":
            world.send(link, step=common_pb2.StepOutput(handles=[handle], token_counts=[1], token_ids=[5]))


@given(events)
@settings(max_examples=150, deadline=None)
def test_any_interleaving_ends_each_sequence_once_and_counts_to_zero(script):
    world = World()
    world.attach("p", PREFILL)
    world.attach("d", DECODE)
    for what, number in script:
        play(world, what, number, set())
        placed = sum(engine.placed_sequences for engine in world.fleet)
        assert placed == sum(len(link.sequences) for link in world.links.values() if not link.closed)
    for link in world.links.values():
        world.membership.leave(link, LossReason.STREAM_ENDED)
    # Who waits for another may have to wait for its own turn then.
    for _ in range(3):
        world.tick()
        world.now += 2 * MAX_WAIT_S
        world.dispatcher.intake.tick()
    world.check_idle()
