"""Faults and stalls as the dispatcher meets them: what counts against an engine, and what it costs."""

from __future__ import annotations

import random

import pytest
from prometheus_client import CollectorRegistry

from catenary.columns import StepRow
from catenary.resume import PoisonedRequests
from catenary.schema import MINIMUM_PEER_REVISION, SCHEMA_REVISION
from catenary.v1 import common_pb2, engine_pb2
from services.router.admission import Admission, AdmissionLimits, QueueOptions, Refused, SpecLimits
from services.router.dispatch import Dispatcher, EngineHealth, LossReason, Membership, PoisonBook, StallWatch
from services.router.dispatch.health import Blame
from services.router.fleet import BreakerOptions, BreakerState, Fleet
from services.router.metrics import RouterMetrics
from services.router.placement import LeastLoaded, Placer

STALL_S = 10.0
INTERNAL = common_pb2.Error(code=common_pb2.ERROR_CODE_INTERNAL, message="broken", retryable=True)


class Sink:
    def __init__(self):
        self.over = {}

    def row(self, handle):
        return StepRow(handle)

    def end(self, handle, end):
        assert handle not in self.over
        self.over[handle] = end

    def refuse(self, handle, error):
        assert handle not in self.over
        self.over[handle] = error

    def abort_result(self, handle, outcome):
        raise AssertionError("nobody asked")


class Stage:
    """A router's inside with a clock that the test turns."""

    def __init__(self):
        self.now = 100.0
        self.changes = 0
        self.fleet = Fleet(lease_s=5, breaker=BreakerOptions(faults=3, window_s=100, open_s=5, open_max_s=60))
        self.admission = Admission(AdmissionLimits(100, 10_000, 10))
        self.registry = CollectorRegistry()
        metrics = RouterMetrics(self.registry)
        watched = {"on_change": self._changed, "clock": lambda: self.now}
        self.health = EngineHealth(metrics, **watched)
        placer = Placer(self.fleet, LeastLoaded(random.Random(0)), retry_after_ms=10)
        self.dispatcher = Dispatcher(
            self.admission,
            placer,
            metrics,
            self.health,
            spec_limits=SpecLimits(100),
            queue_options=QueueOptions(sequences=(0,) * 4),
            poison=PoisonBook(PoisonedRequests(limit=8, ttl_s=60), lambda: None),
            abort_timeout_s=30,
            clock=lambda: self.now,
        )
        self.membership = Membership(
            self.fleet, self.dispatcher, metrics, self.health, max_engines=8, **watched
        )
        self.stalls = StallWatch(
            self.fleet, self.dispatcher, self.health, metrics, limit_s=STALL_S, **watched
        )
        self.sink = Sink()
        self.reports = 0
        self.handles = 0

    def _changed(self):
        self.changes += 1

    def attach(self, instance="i", name="e", role=engine_pb2.ENGINE_ROLE_UNSPECIFIED):
        hello = engine_pb2.EngineHello(
            schema_revision=SCHEMA_REVISION,
            minimum_peer_revision=MINIMUM_PEER_REVISION,
            instance_id=instance,
            engine_name=name,
            model=common_pb2.ModelInfo(name="m", max_model_len=64, vocab_size=100),
            capacity=engine_pb2.Capacity(block_size=16, total_blocks=64, max_running=8, max_waiting=8),
            state=engine_pb2.ENGINE_STATE_SERVING,
            role=role,
        )
        return self.membership.attach(hello)

    def submit(self, *token_ids):
        """Without ids each is another request."""
        self.handles += 1
        spec = common_pb2.SequenceSpec(model="m", token_ids=token_ids or [1, 2 + self.handles])
        self.dispatcher.submit(self.handles, spec, self.sink)
        return self.handles

    def send(self, link, **payload):
        request = engine_pb2.AttachRequest(lease_epoch=link.engine.epoch, **payload)
        self.membership.receive(link, request)

    def report(self, link, state=engine_pb2.ENGINE_STATE_SERVING, **fields):
        self.reports += 1
        self.send(link, load=engine_pb2.LoadReport(sequence=self.reports, state=state, **fields))

    def end(self, link, handles, error=None):
        reason = common_pb2.FINISH_REASON_ERROR if error else common_pb2.FINISH_REASON_STOP
        ends = [common_pb2.SequenceEnd(row=row, reason=reason, error=error) for row in range(len(handles))]
        step = common_pb2.StepOutput(
            handles=handles, token_counts=[1] * len(handles), token_ids=[5] * len(handles), ends=ends
        )
        self.send(link, step=step)


def all_on(stage, link, others, count, *token_ids):
    """Give `count` sequences to one of the engines; what the others are given meanwhile they end well."""
    while len(link.sequences) < count:
        stage.submit(*token_ids)
    for other in others:
        if other.sequences:
            stage.end(other, list(other.sequences))


def test_one_step_that_fails_many_sequences_is_one_fault():
    stage = Stage()
    link, other = stage.attach(), stage.attach("j", "f")
    for _ in range(3):
        assert link.engine.breaker.state is BreakerState.CLOSED
        assert link.engine.available
        all_on(stage, link, [other], 4)
        stage.end(link, list(link.sequences), INTERNAL)
    assert link.engine.breaker.state is BreakerState.OPEN
    for _ in range(8):
        stage.submit()
    assert (len(link.sequences), len(other.sequences)) == (0, 8)
    stage.end(other, list(other.sequences))
    assert stage.admission.live_sequences == 0


def test_failures_of_one_clients_requests_hold_up_no_neighbour_of_the_only_engine():
    stage = Stage()
    link = stage.attach()
    for _ in range(10):
        stage.submit()
        stage.end(link, list(link.sequences), INTERNAL)
    assert link.engine.breaker.state is BreakerState.CLOSED
    neighbour = stage.submit()
    assert neighbour not in stage.sink.over
    assert len(link.sequences) == 1


def test_a_request_that_fails_again_on_its_engine_is_no_further_fault():
    stage = Stage()
    link, other = stage.attach(), stage.attach("j", "f")
    for _ in range(10):
        all_on(stage, link, [other], 1, 7, 7)
        stage.end(link, list(link.sequences), INTERNAL)
    assert link.engine.breaker.state is BreakerState.CLOSED


@pytest.mark.parametrize("refused", [False, True])
def test_requests_that_fail_on_a_second_engine_have_earned_it(refused):
    stage = Stage()
    first, second = stage.attach(), stage.attach("j", "f")

    def fail(link, others, prompt):
        all_on(stage, link, others, 1, *prompt)
        if refused:
            error = common_pb2.Error(code=common_pb2.ERROR_CODE_INTERNAL, message="broken")
            stage.send(link, refusal=common_pb2.Refusal(handle=next(iter(link.sequences)), error=error))
        else:
            stage.end(link, list(link.sequences), INTERNAL)

    prompts = [(9, number) for number in range(10)]
    for prompt in prompts:
        fail(first, [second], prompt)
        fail(second, [first], prompt)
    for link in (first, second):
        assert link.engine.breaker.state is BreakerState.CLOSED
        assert not link.engine.breaker.remembers(stage.now)


def test_an_engine_closed_off_by_requests_that_fail_elsewhere_too_is_given_work_again():
    stage = Stage()
    first, second = stage.attach(), stage.attach("j", "f")
    prompts = [(9, number) for number in range(3)]
    for prompt in prompts:
        all_on(stage, first, [second], 1, *prompt)
        stage.end(first, list(first.sequences), INTERNAL)
    assert first.engine.breaker.state is BreakerState.OPEN
    stage.submit(*prompts[0])
    stage.end(second, list(second.sequences), INTERNAL)
    assert first.engine.breaker.state is BreakerState.CLOSED
    assert second.engine.breaker.state is BreakerState.CLOSED
    assert not second.engine.breaker.remembers(stage.now)


def test_a_broken_engine_is_closed_off_though_its_requests_succeed_elsewhere():
    stage = Stage()
    broken, well = stage.attach(), stage.attach("j", "f")
    for number in range(3):
        all_on(stage, broken, [well], 1, 9, number)
        stage.end(broken, list(broken.sequences), INTERNAL)
    assert broken.engine.breaker.state is BreakerState.OPEN
    for number in range(3):
        stage.submit(9, number)
    stage.end(well, list(well.sequences))
    assert broken.engine.breaker.state is BreakerState.OPEN


PREFILL, DECODE = engine_pb2.ENGINE_ROLE_PREFILL, engine_pb2.ENGINE_ROLE_DECODE
WHOLE = engine_pb2.ENGINE_ROLE_UNSPECIFIED


def request(number):
    return common_pb2.SequenceSpec(model="m", token_ids=[9, number])


@pytest.mark.parametrize("other", [PREFILL, DECODE, WHOLE])
@pytest.mark.parametrize("role", [PREFILL, DECODE, WHOLE])
def test_an_engine_is_closed_off_where_one_of_any_role_is_left(role, other):
    stage = Stage()
    blame = Blame(stage.fleet, stage.health, clock=lambda: stage.now)
    broken = stage.attach("i", "e", role).engine
    for number in range(3):
        blame.failed(broken, [request(number)])
    assert broken.breaker.state is BreakerState.CLOSED
    stage.attach("j", "f", other)
    for number in range(3, 6):
        blame.failed(broken, [request(number)])
    assert broken.breaker.state is BreakerState.OPEN


@pytest.mark.parametrize(("pause_s", "counted"), [(99.0, 1), (101.0, 20)])
def test_a_request_is_remembered_as_long_as_it_goes_on_failing_within_the_window(pause_s, counted):
    """A breaker with a long window must not be opened by one request that is sent again now and then."""
    stage = Stage()
    blame = Blame(stage.fleet, stage.health, clock=lambda: stage.now)
    engine = stage.attach().engine
    stage.attach("j", "f")
    faults = []

    def failed(engine):
        faults.append(engine)
        return stage.now

    stage.health.failed = failed
    for _ in range(20):
        blame.failed(engine, [request(1)])
        stage.now += pause_s
    assert len(faults) == counted


def test_requests_that_failed_are_remembered_in_bounded_memory():
    stage = Stage()
    blame = Blame(stage.fleet, stage.health, clock=lambda: stage.now)
    engine = stage.attach().engine
    stage.attach("j", "f")
    faults = []

    def failed(engine):
        faults.append(engine)
        return stage.now

    stage.health.failed = failed

    def counts(number):
        faults.clear()
        blame.failed(engine, [request(number)])
        return bool(faults)

    assert all(counts(number) for number in range(3000))
    # The last 1024 are known; one that counts again pushes out the one that failed longest ago.
    assert not counts(3000 - 1024)
    assert counts(3000 - 1025)
    assert counts(3000 - 1023)
    assert not counts(2999)
    stage.now += 101
    assert all(counts(number) for number in range(3000 - 1024, 3000))


@pytest.mark.parametrize(
    "code",
    [
        common_pb2.ERROR_CODE_INVALID_ARGUMENT,
        common_pb2.ERROR_CODE_UNSUPPORTED,
        common_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED,
        common_pb2.ERROR_CODE_OVERLOADED,
        common_pb2.ERROR_CODE_DRAINING,
        common_pb2.ERROR_CODE_CANCELLED,
        common_pb2.ERROR_CODE_DUPLICATE_REQUEST,
    ],
)
def test_errors_that_requests_earned_never_open_a_breaker(code):
    stage = Stage()
    link = stage.attach()
    error = common_pb2.Error(code=code, message="no")
    for _ in range(20):
        stage.submit()
        stage.end(link, list(link.sequences), error)
        stage.submit()
        refusal = common_pb2.Refusal(handle=next(iter(link.sequences)), error=error)
        stage.send(link, refusal=refusal)
    assert link.engine.breaker.state is BreakerState.CLOSED
    assert not link.engine.breaker.remembers(stage.now)


def test_a_crash_loop_gets_one_sequence_and_then_all():
    stage = Stage()
    for life in range(3):
        link = stage.attach(f"life-{life}")
        stage.submit()
        stage.membership.leave(link, LossReason.STREAM_ENDED)
        stage.now += 1
    link = stage.attach("life-3")
    with pytest.raises(Refused):
        stage.submit()
    changes = stage.changes
    stage.now += 5
    stage.health.sweep(stage.fleet)
    assert stage.changes == changes + 1
    stage.submit()
    with pytest.raises(Refused):
        stage.submit()
    stage.end(link, list(link.sequences))
    for _ in range(8):
        stage.submit()
    assert len(link.sequences) == 8


def test_a_drained_engine_that_leaves_is_no_fault():
    stage = Stage()
    for life in range(5):
        link = stage.attach(f"life-{life}")
        stage.submit()
        stage.report(link, engine_pb2.ENGINE_STATE_DRAINING)
        lost = common_pb2.Error(code=common_pb2.ERROR_CODE_ENGINE_LOST, message="over", retryable=True)
        stage.end(link, list(link.sequences), lost)
        stage.membership.leave(link, LossReason.STREAM_ENDED)
    assert stage.attach("last").engine.available


def test_an_engine_with_work_and_no_step_loses_it_and_gets_nothing_until_it_steps():
    stage = Stage()
    link = stage.attach()
    first, second = stage.submit(), stage.submit()
    assert link.pop().submit.handle
    stage.now += STALL_S + 1
    stage.report(link, running=1, waiting=1)
    stage.stalls.sweep()
    for handle in (first, second):
        end = stage.sink.over[handle]
        assert (end.error.code, end.error.retryable) == (common_pb2.ERROR_CODE_ENGINE_LOST, True)
    # The one that was sent is aborted there and counts until that is confirmed; the other never was sent.
    (held,) = link.sequences
    assert link.pop().renewed.sequence
    assert link.pop().abort.handle == held
    assert link.pop() is None
    assert link.engine.placed_sequences == 1
    assert stage.fleet.served_models()[0].serving_engines == 0
    with pytest.raises(Refused):
        stage.submit()
    # Tokens of a past life reach nobody.
    stage.send(link, step=common_pb2.StepOutput(handles=[held], token_counts=[1], token_ids=[5]))
    aborted = engine_pb2.AbortResult(handle=held, outcome=common_pb2.ABORT_OUTCOME_ALREADY_FINISHED)
    stage.send(link, abort_result=aborted)
    assert stage.admission.live_sequences == 0
    count = stage.registry.get_sample_value
    assert count("catenary_router_ends_total", {"reason": "stalled"}) == 2
    assert count("catenary_router_ends_total", {"reason": "abort"}) is None
    assert count("catenary_router_aborts_total", {"cause": "stalled"}) == 2
    assert stage.submit()
    assert len(link.sequences) == 1


def test_steps_for_others_and_an_empty_engine_are_no_stall():
    stage = Stage()
    link = stage.attach()
    stage.now += 1000
    stage.stalls.sweep()
    assert not link.engine.stalled
    # Work counts from when it came, not from the last step before it.
    stage.submit()
    stage.now += STALL_S - 1
    stage.stalls.sweep()
    assert not link.engine.stalled
    for steps in range(1, 6):
        stage.now += STALL_S - 1
        stage.report(link, running=8, waiting=1, steps=steps)
        stage.stalls.sweep()
        assert not link.engine.stalled
    # A count that stands still or goes back is none.
    stage.now += STALL_S + 1
    stage.report(link, running=8, waiting=1, steps=2)
    stage.stalls.sweep()
    assert link.engine.stalled
    # It says that it has nothing: it owes nothing.
    stage.report(link, steps=2)
    assert not link.engine.stalled


def test_an_engine_that_knows_nothing_of_what_it_was_given_is_stalled():
    stage = Stage()
    link = stage.attach()
    handle = stage.submit()
    assert link.pop().submit.handle
    for _ in range(3):
        stage.now += STALL_S / 2
        stage.report(link)
        stage.stalls.sweep()
    assert stage.sink.over[handle].error.code == common_pb2.ERROR_CODE_ENGINE_LOST
    assert link.engine.stalled
    stage.report(link)
    assert not link.engine.stalled
