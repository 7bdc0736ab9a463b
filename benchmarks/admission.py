"""What a decision of admission costs the router: fair queues, and whole sequences through the dispatcher.

python benchmarks/admission.py
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from catenary.resume import PoisonedRequests
from catenary.telemetry import configure_logging
from catenary.v1 import common_pb2, engine_pb2
from services.router.admission import Admission, AdmissionLimits, QueueOptions, SpecLimits, WaitingRoom
from services.router.dispatch import Dispatcher, EngineHealth, PoisonBook
from services.router.dispatch.sequence import NULL_SINK
from services.router.fleet import Fleet
from services.router.metrics import RouterMetrics
from services.router.placement import LeastLoaded, Placer

WAITING = 4096
PROMPT = 512


def queues(tenants: int) -> tuple[float, float]:
    """Microseconds to let a sequence wait, and to take the next one, with so many tenants waiting."""
    room: WaitingRoom[int] = WaitingRoom(QueueOptions(), lambda ticket: ticket.tokens)
    rng = random.Random(0)
    specs = [
        common_pb2.SequenceSpec(
            model="m", token_ids=[1] * rng.randrange(1, PROMPT), tenant=f"t{number % tenants}"
        )
        for number in range(WAITING)
    ]
    began = time.perf_counter()
    for number, spec in enumerate(specs):
        room.add(room.ticket(number, spec, 0.0, first=False, apart=False), 0.0)
    added = time.perf_counter()
    lanes = room.queue_of("m").lanes
    while len(room):
        room.take(next(lanes.heads()), 0.0)
    taken = time.perf_counter()
    return (added - began) / WAITING * 1e6, (taken - added) / WAITING * 1e6


def dispatched(engines: int, *, room: bool) -> float:
    """Microseconds to submit a sequence that is placed at once (`room`), or waits."""
    fleet = Fleet(lease_s=5)
    metrics = RouterMetrics(CollectorRegistry())
    due: list[Callable[[], None]] = []
    dispatcher = Dispatcher(
        Admission(AdmissionLimits(1 << 20, 1 << 32, 1000)),
        Placer(fleet, LeastLoaded(random.Random(0)), retry_after_ms=1000),
        metrics,
        EngineHealth(metrics, on_change=lambda: None),
        spec_limits=SpecLimits(1 << 20),
        queue_options=QueueOptions(sequences=(WAITING,) * 4, tokens=(1 << 32,) * 4),
        poison=PoisonBook(PoisonedRequests(limit=1, ttl_s=1), lambda: None),
        abort_timeout_s=30,
        call_soon=due.append,
    )
    for number in range(engines):
        hello = engine_pb2.EngineHello(
            instance_id=f"e{number}",
            engine_name=f"e{number}",
            model=common_pb2.ModelInfo(name="m", max_model_len=1 << 20, vocab_size=100),
            capacity=engine_pb2.Capacity(
                block_size=16, total_blocks=1 << 24, max_running=WAITING if room else 1
            ),
            state=engine_pb2.ENGINE_STATE_SERVING,
        )
        dispatcher.connect(fleet.attach(hello, now=0.0, unix_time=0.0)[0])
    specs = [common_pb2.SequenceSpec(model="m", token_ids=[1] * PROMPT) for _ in range(2048 + engines)]
    for handle, spec in enumerate(specs[:engines]):
        dispatcher.submit(handle, spec, NULL_SINK)
    began = time.process_time()
    for handle, spec in enumerate(specs[engines:]):
        dispatcher.submit(handle, spec, NULL_SINK)
    return (time.process_time() - began) / 2048 * 1e6


if __name__ == "__main__":
    configure_logging(level="warning", fmt="text", service="benchmark")
    for tenants in (1, 64, WAITING):
        add, take = queues(tenants)
        print(f"{WAITING} waiting, {tenants} tenants: {add:.1f} us to wait, {take:.1f} us to be taken")
    for engines in (1, 16, 256):
        placed, waits = dispatched(engines, room=True), dispatched(engines, room=False)
        print(f"{engines} engines: {placed:.0f} us to be placed, {waits:.0f} us to wait")
