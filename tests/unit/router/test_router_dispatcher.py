"""The dispatcher under any interleaving: one end for each sequence, and every count back to zero."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from catenary.columns import StepRow
from catenary.resume import Cause, PoisonedRequests, ResumePolicy
from catenary.schema import MINIMUM_PEER_REVISION, SCHEMA_REVISION
from catenary.v1 import common_pb2, engine_pb2
from services.router.admission import Admission, AdmissionLimits, QueueOptions, Refused, SpecLimits
from services.router.dispatch import (
    AbortCause,
    Dispatcher,
    EngineHealth,
    LossReason,
    Membership,
    PlainCall,
    PoisonBook,
)
from services.router.fleet import Fleet
from services.router.metrics import RouterMetrics
from services.router.placement import LeastLoaded, Placer
from tests.support.waiting import eventually

ABORT_TIMEOUT_S = 30.0
MAX_WAIT_S = 20.0
QUEUES = QueueOptions(
    sequences=(4,) * 4,
    tokens=(1000,) * 4,
    wait_s=(MAX_WAIT_S,) * 4,
    kept_shares=(),
    promote_after_s=8,
    unserved_s=10,
    retry_after_ms=10,
)


class RecordingSink:
    """Remembers everything, and fails on what a sink must never see."""

    def __init__(self) -> None:
        self.rows: dict[int, StepRow] = {}
        self.over: dict[int, object] = {}
        self.answers: list[tuple[int, int]] = []

    def row(self, handle):
        assert handle not in self.over, "output after the end"
        return self.rows.setdefault(handle, StepRow(handle))

    def end(self, handle, end):
        assert handle not in self.over, "two ends"
        self.over[handle] = end

    def refuse(self, handle, error):
        assert handle not in self.over, "two ends"
        assert handle not in self.rows, "refused after output"
        self.over[handle] = error

    def abort_result(self, handle, outcome):
        self.answers.append((handle, outcome))


class World:
    """A dispatcher with engines that the test plays, a clock that it turns, and one sink."""

    def __init__(self, *, backlog: int = 3, queues: QueueOptions = QUEUES) -> None:
        self.now = 0.0
        self.due = []
        self.fleet = Fleet(lease_s=5, backlog=backlog)
        self.admission = Admission(AdmissionLimits(8, 200, retry_after_ms=10))
        self.metrics = RouterMetrics(CollectorRegistry())
        self.health = EngineHealth(self.metrics, on_change=self._changed, clock=lambda: self.now)
        placer = Placer(self.fleet, LeastLoaded(random.Random(0)), retry_after_ms=10)
        self.dispatcher = Dispatcher(
            self.admission,
            placer,
            self.metrics,
            self.health,
            spec_limits=SpecLimits(100),
            queue_options=queues,
            poison=PoisonBook(PoisonedRequests(limit=8, ttl_s=60), lambda: None),
            abort_timeout_s=ABORT_TIMEOUT_S,
            clock=lambda: self.now,
            call_soon=self.due.append,
        )
        self.changes = 0
        self.membership = Membership(
            self.fleet,
            self.dispatcher,
            self.metrics,
            self.health,
            max_engines=8,
            on_change=self._changed,
            clock=lambda: self.now,
        )
        self.sink = RecordingSink()
        self.sequences = {}
        self.links = []
        self.gone = set()

    def _changed(self):
        self.changes += 1

    def attach(self, name="a"):
        hello = engine_pb2.EngineHello(
            schema_revision=SCHEMA_REVISION,
            minimum_peer_revision=MINIMUM_PEER_REVISION,
            instance_id=name,
            engine_name=name,
            model=common_pb2.ModelInfo(name="m", max_model_len=64, vocab_size=100),
            capacity=engine_pb2.Capacity(block_size=16, total_blocks=64, max_running=3, max_waiting=3),
            state=engine_pb2.ENGINE_STATE_SERVING,
        )
        link = self.membership.attach(hello)
        self.links = [known for known in self.links if not known.closed] + [link]
        return link

    def submit(self, handle, tokens=3, *, resumed=False, alone=False, **fields):
        spec = common_pb2.SequenceSpec(model="m", token_ids=[1] * tokens, **fields)
        try:
            self.sequences[handle] = self.dispatcher.submit(
                handle, spec, self.sink, resumed=resumed, alone=alone
            )
        except Refused as refusal:
            return refusal.error
        return None

    def tick(self):
        """The end of a tick of the loop."""
        due, self.due[:] = list(self.due), []
        for call in due:
            call()

    def send(self, link, **payload):
        self.membership.receive(link, engine_pb2.AttachRequest(lease_epoch=link.engine.epoch, **payload))

    def step(self, link, handles, *, ends=False):
        reason = common_pb2.FINISH_REASON_STOP
        step = common_pb2.StepOutput(
            handles=handles,
            token_counts=[1] * len(handles),
            token_ids=[5] * len(handles),
            ends=[common_pb2.SequenceEnd(row=i, reason=reason) for i in range(len(handles)) if ends],
        )
        self.send(link, step=step)

    def check_counts(self):
        live = [
            s for s in self.sequences.values() if s.handle not in self.sink.over and s.handle not in self.gone
        ]
        assert self.admission.live_sequences >= len(live)
        held = sum(len(link.sequences) for link in self.links)
        assert self.admission.live_sequences == held + len(self.dispatcher.intake.room)
        assert len(self.dispatcher.intake.room) <= 4 + sum(s.resumed for s in live)
        assert sum(engine.placed_sequences for engine in self.fleet) == held
        for link in self.links:
            unstarted = [s for s in link.sequences.values() if not s.emitted]
            assert link.engine.placed_prefill == sum(s.request.uncached_tokens for s in unstarted)

    def check_idle(self):
        assert self.admission.live_sequences == self.admission.live_tokens == 0
        assert all(engine.placed_sequences == engine.placed_tokens == 0 for engine in self.fleet)
        for handle in self.sequences.keys() - self.gone:
            assert handle in self.sink.over


events = st.lists(
    st.tuples(
        st.sampled_from(
            [
                *("attach", "leave", "report", "sweep", "tick", "wait"),
                *("submit", "submit", "resume", "abort", "abandon"),
                *("step", "finish", "refuse", "refuse hard", "aborted", "unknown"),
            ]
        ),
        st.integers(0, 11),
    ),
    max_size=80,
)


def play(world: World, what: str, number: int) -> None:
    link = world.links[number % len(world.links)] if world.links else None
    sequence = world.sequences.get(number)
    match what:
        case "attach":
            world.attach("abc"[number % 3])
        case "submit" if number not in world.sequences:
            world.submit(number, tokens=number + 1)
        case "resume" if number not in world.sequences:
            world.submit(number, resumed=True)
        case "tick":
            world.tick()
        case "wait":
            world.now += MAX_WAIT_S * 0.4
            world.dispatcher.intake.tick()
        case "abort" if sequence is not None:
            world.dispatcher.abort(sequence, AbortCause.CLIENT, answer=True)
        case "abandon" if sequence is not None:
            world.dispatcher.abandon(sequence, AbortCause.DISCONNECT)
            world.gone.add(number)
        case "sweep":
            world.now += ABORT_TIMEOUT_S * 0.6
            world.dispatcher.sweep()
        case "leave" if link is not None:
            world.membership.leave(link, LossReason.STREAM_ENDED)
        case "report" if link is not None:
            load = engine_pb2.LoadReport(sequence=number, state=engine_pb2.ENGINE_STATE_SERVING)
            world.send(link, load=load)
        case "step" | "finish" if link is not None:
            world.step(link, [*link.sequences, 10_000], ends=what == "finish")
        case _ if link is not None and link.sequences:
            handle = list(link.sequences)[number % len(link.sequences)]
            answer(world, link, what, handle)


def answer(world: World, link, what: str, handle: int) -> None:
    if what.startswith("refuse"):
        error = common_pb2.Error(code=common_pb2.ERROR_CODE_OVERLOADED, retryable=what == "refuse")
        world.send(link, refusal=common_pb2.Refusal(handle=handle, error=error))
    elif what in ("aborted", "unknown"):
        outcome = common_pb2.ABORT_OUTCOME_ABORTED if what == "aborted" else common_pb2.ABORT_OUTCOME_UNKNOWN
        world.send(link, abort_result=engine_pb2.AbortResult(handle=handle, outcome=outcome))


@given(events)
@settings(max_examples=300, deadline=None)
def test_any_interleaving_ends_each_sequence_once_and_counts_to_zero(script):
    world = World()
    world.attach("a")
    for what, number in script:
        play(world, what, number)
        world.links = [link for link in world.links if not link.closed]
        world.check_counts()
    for link in world.links:
        world.membership.leave(link, LossReason.STREAM_ENDED)
    world.now += MAX_WAIT_S
    world.dispatcher.intake.tick()
    world.check_idle()


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
    assert len(world.dispatcher.intake.room) == 1
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
    assert link._next() is None
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


def test_the_metrics_name_what_happened():
    world = World()
    link = world.attach()
    world.submit(1)
    world.submit(2, tokens=101)
    world.step(link, list(link.sequences), ends=True)
    world.submit(3)
    world.dispatcher.abandon(world.sequences[3], AbortCause.SLOW_READER)
    world.membership.leave(link, LossReason.LEASE_EXPIRED)
    read = world.metrics._registry.get_sample_value
    assert read("catenary_router_submits_total") == 3
    assert read("catenary_router_refusals_total", {"code": "context_length_exceeded"}) == 1
    assert read("catenary_router_ends_total", {"reason": "stop"}) == 1
    assert read("catenary_router_aborts_total", {"cause": "slow_reader"}) == 1
    assert read("catenary_router_engine_losses_total", {"reason": "lease_expired"}) == 1


def test_what_finds_no_room_waits_in_order_until_there_is_some():
    world = World(backlog=0)
    link = world.attach()
    for handle in range(6):
        assert world.submit(handle) is None
    assert len(world.dispatcher.intake.room) == 3
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
    assert len(world.dispatcher.intake.room) == 0
    world.check_counts()


def test_a_wait_has_an_end():
    world = World(backlog=0)
    link = world.attach()
    for handle in range(3):
        world.submit(handle)
    world.submit(3)
    world.submit(4, max_wait_ms=5000)
    world.now = 5.0
    world.dispatcher.intake.tick()
    assert world.sink.over.keys() == {4}
    world.now = MAX_WAIT_S
    world.dispatcher.intake.tick()
    for handle, seconds in ((3, "20"), (4, "5")):
        assert world.sink.over[handle].code == common_pb2.ERROR_CODE_TIMEOUT
        assert world.sink.over[handle].retryable
        assert f"within {seconds} seconds" in world.sink.over[handle].message
    world.membership.leave(link, LossReason.STREAM_ENDED)
    world.check_idle()


def test_engines_that_are_full_serve_however_short_their_absence_may_be():
    world = World(backlog=0, queues=replace(QUEUES, unserved_s=0))
    link = world.attach()
    world.dispatcher.intake.tick()
    world.now += 0.05
    for handle in range(3):
        world.submit(handle)
    assert world.submit(3) is None
    assert len(world.dispatcher.intake.room) == 1
    world.membership.leave(link, LossReason.STREAM_ENDED)
    world.dispatcher.intake.fleet_changed()
    world.tick()
    assert world.submit(4).code == common_pb2.ERROR_CODE_UNAVAILABLE


def test_sequences_for_engines_of_their_own_take_turns_within_the_bounds_of_their_lane():
    world = World()
    link = world.attach()
    world.submit(0)
    for handle in range(1, 5):
        assert world.submit(handle, alone=True) is None
    assert "lane-sequences" in world.submit(5, alone=True).message
    assert world.submit(6, alone=True, resumed=True) is None
    tried = []
    place = world.dispatcher._placer.place
    world.dispatcher._placer.place = lambda request, **kw: tried.append(request) or place(request, **kw)
    world.tick()
    assert len(tried) == 1
    # Whoever gives up his turn leaves it to the next one.
    world.dispatcher.abort(world.sequences[1], AbortCause.CLIENT)
    for handle in (0, 2, 3, 4, 6):
        assert [s.handle for s in link.sequences.values()] == [handle]
        world.step(link, list(link.sequences), ends=True)
        world.tick()
    world.check_idle()
    assert not link.engine.kept_for


def test_nothing_waits_in_a_router_that_drains():
    world = World(backlog=0)
    link, other = world.attach("a"), world.attach("b")
    for handle in range(7):
        world.submit(handle)
    assert len(world.dispatcher.intake.room) == 1
    over = common_pb2.Error(code=common_pb2.ERROR_CODE_DRAINING, message="over", retryable=True)
    world.admission.drain()
    world.dispatcher.intake.close(over)
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
