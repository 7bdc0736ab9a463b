"""A router's dispatcher over engines for prompts and for what follows them, which the test plays."""

from __future__ import annotations

import random
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from catenary.resume import PoisonedRequests
from catenary.v1 import common_pb2, engine_pb2
from services.router.admission import Admission, AdmissionLimits, QueueOptions, Refused, SpecLimits
from services.router.dispatch import Dispatcher, EngineHealth, Membership, PoisonBook
from services.router.fleet import Fleet
from services.router.metrics import RouterMetrics
from services.router.placement import LeastLoaded, Placer, SplitPlacer
from tests.support.dispatcher import RecordingSink, hello

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


class World:
    """A dispatcher over engines that the test plays."""

    def __init__(self) -> None:
        self.now = 0.0
        self.due: list[Any] = []
        self.fleet = Fleet(lease_s=5, backlog=1)
        self.admission = Admission(AdmissionLimits(16, 4000, retry_after_ms=10))
        self.metrics = RouterMetrics(CollectorRegistry())
        health = EngineHealth(self.metrics, on_change=lambda: None, clock=lambda: self.now)
        whole = Placer(self.fleet, LeastLoaded(random.Random(0)), retry_after_ms=10)
        placer = SplitPlacer(whole, min_handover_tokens=16)
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
            on_change=self.dispatcher.lifecycle.fleet_changed,
            clock=lambda: self.now,
        )
        self.sink = RecordingSink()
        self.sequences: dict[Any, Any] = {}
        self.links: dict[Any, Any] = {}

    def attach(self, name, role):
        link = self.links[name] = self.membership.attach(hello(name, role=role))
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
        while (message := link.pop()) is not None:
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
        return self.metrics.registry.get_sample_value("catenary_router_handovers_total", {"result": result})

    def check_idle(self):
        assert self.admission.live_sequences == self.admission.live_tokens == 0
        assert all(engine.placed_sequences == engine.placed_tokens == 0 for engine in self.fleet)
        assert self.sequences.keys() == self.sink.over.keys()
        assert all(not link.sequences for link in self.links.values())


def offer(tokens=LONG, **fields):
    """An offer of the KV of so many tokens."""
    values = {"connector": "shm", "ticket": b"t" * 32, "tokens": tokens - 1, "blocks": 3, "address": "/a"}
    return common_pb2.KvOffer(**{**values, **fields})


@pytest.fixture
def world():
    """An engine for prompts and one for what follows them."""
    world = World()
    world.prefill, world.decode = world.attach("p", PREFILL), world.attach("d", DECODE)
    return world


def prompt_part(world, handle=1, **fields):
    """Submits a long prompt; returns what its first engine is sent."""
    assert world.submit(handle, **fields) is None
    (submit,) = world.submits(world.prefill)
    assert submit.prefill_only
    assert world.submits(world.decode) == []
    return submit
