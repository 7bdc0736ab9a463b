"""A router's dispatcher on its own, with engines that the test plays."""

from __future__ import annotations

import random
from typing import Any

from prometheus_client import CollectorRegistry

from catenary.columns import StepRow
from catenary.resume import PoisonedRequests
from catenary.schema import MINIMUM_PEER_REVISION, SCHEMA_REVISION
from catenary.v1 import common_pb2, engine_pb2
from services.router.admission import Admission, AdmissionLimits, QueueOptions, Refused, SpecLimits
from services.router.dispatch import Dispatcher, EngineHealth, Membership, PoisonBook
from services.router.fleet import Fleet
from services.router.metrics import RouterMetrics
from services.router.placement import LeastLoaded, Placer

ABORT_TIMEOUT_S = 30.0
MAX_WAIT_S = 20.0
QUEUES = QueueOptions(
    sequences=(4,) * 4,
    tokens=(1000,) * 4,
    wait_s=(MAX_WAIT_S,) * 4,
    reserved_shares=(),
    promote_after_s=8,
    unserved_s=10,
    retry_after_ms=10,
)


def hello(name, **fields):
    """Of an engine that serves the model `m`, three sequences at a time."""
    return engine_pb2.EngineHello(
        schema_revision=SCHEMA_REVISION,
        minimum_peer_revision=MINIMUM_PEER_REVISION,
        instance_id=name,
        engine_name=name,
        model=common_pb2.ModelInfo(name="m", max_model_len=64, vocab_size=100, eos_token_ids=[2]),
        capacity=engine_pb2.Capacity(block_size=16, total_blocks=64, max_running=3, max_waiting=3),
        state=engine_pb2.ENGINE_STATE_SERVING,
        **fields,
    )


class RecordingSink:
    """Remembers everything, and fails on what a sink must never see."""

    def __init__(self) -> None:
        self.rows: dict[int, StepRow] = {}
        self.over: dict[int, Any] = {}
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

    def __init__(self, *, backlog: int = 3, queues: QueueOptions = QUEUES, live: int = 8) -> None:
        self.now = 0.0
        self.due: list[Any] = []
        self.fleet = Fleet(lease_s=5, backlog=backlog)
        self.admission = Admission(AdmissionLimits(live, 200, retry_after_ms=10))
        self.metrics = RouterMetrics(CollectorRegistry())
        self.health = EngineHealth(self.metrics, on_change=self._changed, clock=lambda: self.now)
        placer = self.placer = Placer(self.fleet, LeastLoaded(random.Random(0)), retry_after_ms=10)
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
        self.sequences: dict[Any, Any] = {}
        self.links: list[Any] = []
        self.gone: set[Any] = set()

    def _changed(self):
        self.changes += 1

    def attach(self, name="a"):
        link = self.membership.attach(hello(name))
        self.links = [known for known in self.links if not known.closed] + [link]
        return link

    def submit(self, handle, tokens=3, *, resumed=False, quarantined=False, **fields):
        spec = common_pb2.SequenceSpec(model="m", token_ids=[1] * tokens, **fields)
        try:
            self.sequences[handle] = self.dispatcher.submit(
                handle, spec, self.sink, resumed=resumed, quarantined=quarantined
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
        assert self.admission.live_sequences == held + len(self.dispatcher.lifecycle.queues)
        assert len(self.dispatcher.lifecycle.queues) <= 4 + sum(s.resumed for s in live)
        assert sum(engine.placed_sequences for engine in self.fleet) == held
        for link in self.links:
            unstarted = [s for s in link.sequences.values() if not s.emitted]
            assert link.engine.placed_prefill == sum(s.request.uncached_tokens for s in unstarted)

    def check_idle(self):
        assert self.admission.live_sequences == self.admission.live_tokens == 0
        assert all(engine.placed_sequences == engine.placed_tokens == 0 for engine in self.fleet)
        for handle in self.sequences.keys() - self.gone:
            assert handle in self.sink.over
