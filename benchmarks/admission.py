"""What a decision of admission costs the router: fair queues, and whole sequences through the dispatcher.

Run: `python -m benchmarks.admission`.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry

import catenary.grpc_environment  # noqa: F401
from catenary.resume import PoisonedRequests
from catenary.telemetry import configure_logging
from catenary.v1 import common_pb2, engine_pb2
from services.router.admission import Admission, AdmissionLimits, AdmissionQueues, QueueOptions, SpecLimits
from services.router.dispatch import Dispatcher, EngineHealth, PoisonBook
from services.router.dispatch.sequence import NULL_SINK
from services.router.fleet import Fleet
from services.router.metrics import RouterMetrics
from services.router.placement import LeastLoaded, Placer

PROMPT = 512


def queues(waiting: int, tenants: int) -> tuple[float, float]:
    """Return microseconds to let one of `waiting` sequences wait, and to take the next one."""
    room: AdmissionQueues[int] = AdmissionQueues(QueueOptions(), lambda entry: entry.tokens)
    rng = random.Random(0)
    specs = [
        common_pb2.SequenceSpec(
            model="m", token_ids=[1] * rng.randrange(1, PROMPT), tenant=f"t{number % tenants}"
        )
        for number in range(waiting)
    ]
    began = time.perf_counter()
    for number, spec in enumerate(specs):
        room.add(room.entry(number, spec, 0.0, first=False, apart=False), 0.0)
    added = time.perf_counter()
    lanes = room.queue_of("m").lanes
    while len(room):
        room.take(next(lanes.heads()), 0.0)
    taken = time.perf_counter()
    return (added - began) / waiting * 1e6, (taken - added) / waiting * 1e6


def dispatched(waiting: int, engines: int, *, room: bool) -> float:
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
        queue_options=QueueOptions(sequences=(waiting,) * 4, tokens=(1 << 32,) * 4),
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
                block_size=16, total_blocks=1 << 24, max_running=waiting if room else 1
            ),
            state=engine_pb2.ENGINE_STATE_SERVING,
        )
        dispatcher.connect(fleet.attach(hello, now=0.0, unix_time=0.0)[0])
    specs = [
        common_pb2.SequenceSpec(model="m", token_ids=[1] * PROMPT) for _ in range(waiting // 2 + engines)
    ]
    for handle, spec in enumerate(specs[:engines]):
        dispatcher.submit(handle, spec, NULL_SINK)
    began = time.process_time()
    for handle, spec in enumerate(specs[engines:]):
        dispatcher.submit(handle, spec, NULL_SINK)
    return (time.process_time() - began) / (waiting // 2) * 1e6


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.admission", description=__doc__)
    parser.add_argument(
        "--waiting", type=int, default=4096, help="sequences that wait; half of them are submitted"
    )
    waiting = parser.parse_args().waiting
    configure_logging(level="warning", fmt="text", service="benchmark")
    for tenants in (1, 64, waiting):
        add, take = queues(waiting, tenants)
        print(f"{waiting} waiting, {tenants} tenants: {add:.1f} us to wait, {take:.1f} us to be taken")
    for engines in (1, 16, 256):
        placed, waits = dispatched(waiting, engines, room=True), dispatched(waiting, engines, room=False)
        print(f"{engines} engines: {placed:.0f} us to be placed, {waits:.0f} us to wait")


if __name__ == "__main__":
    main()
