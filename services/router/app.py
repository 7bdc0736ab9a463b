"""The router put together: its parts, its periodic work, and the order of its start and end."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from prometheus_client import REGISTRY, CollectorRegistry

from catenary.config import unknown_variables
from catenary.rpc import Role, RpcServer
from catenary.runtime import mark_started
from catenary.telemetry import configure_logging, configure_tracing, get_logger, new_id
from catenary.v1 import common_pb2, engine_pb2_grpc, router_pb2_grpc
from services.router.admission import Admission, AdmissionLimits, SpecLimits
from services.router.config import RouterConfig
from services.router.dispatch import (
    AbortCause,
    Dispatcher,
    EngineHealth,
    Membership,
    PoisonBook,
    Sessions,
    StallWatch,
)
from services.router.fleet import Engine, Fleet
from services.router.index import KvIndex
from services.router.metrics import RouterMetrics
from services.router.placement import Placer, Prefixes, ReceiptBook, SplitPlacer, policy_named
from services.router.service import (
    AttachTerms,
    FleetServicer,
    GenerateCalls,
    KvStreams,
    ReaderWatch,
    RouterServicer,
    SessionStreams,
)

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class PeriodicTask:
    """Function that is called every `period_s` seconds.

    `judges`: it judges peers by their silence. After a time in which this process stood still, when its peers
    did not, it is left out once: the peers are heard for a period first.
    """

    name: str
    period_s: float
    act: Callable[[], None]
    judges: bool = False


class PeriodicTasks:
    """Runs each task in a task of its own: one that fails holds up no other and is tried again."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, *tasks: PeriodicTask) -> None:
        """Start tasks; each runs first after a period."""
        self._tasks += [asyncio.create_task(_repeat(task), name=task.name) for task in tasks]

    async def stop(self) -> None:
        """End all. May be called without a start."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


async def _repeat(task: PeriodicTask) -> None:
    loop = asyncio.get_running_loop()
    heard = True
    well = True
    while True:
        due = loop.time() + task.period_s
        await asyncio.sleep(task.period_s)
        heard = not heard or loop.time() - due <= task.period_s
        if task.judges and not heard:
            continue
        try:
            task.act()
            well = True
        except Exception:
            # Once per row of failures: a task comes several times a second.
            if well:
                _log.exception("a periodic task failed", task=task.name)
            well = False


SERVICE = "catenary.v1.RouterService"
ACCESS = {
    "/catenary.v1.RouterService/": frozenset({Role.CLIENT}),
    "/catenary.v1.FleetService/": frozenset({Role.ENGINE}),
}

MODELS_PERIOD_S = 1.0
SWEEP_PERIOD_S = 0.25
QUEUE_PERIOD_S = 0.1
# An entry that comes later than the queue was full costs a render for each request in between.
SHED_PERIOD_S = 0.05
IDLE_POLL_S = 0.02
STOP_GRACE_S = 2.0

SHUTTING_DOWN = common_pb2.Error(
    code=common_pb2.ERROR_CODE_DRAINING, message="The router is shutting down.", retryable=True
)


class Router:
    """One router in this process. Built inside of the running loop.

    `registry` takes its metrics; by default one of its own, so that several routers can live in one process.
    """

    def __init__(
        self,
        config: RouterConfig,
        *,
        registry: CollectorRegistry | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.instance_id = new_id("router-")
        self._config = config
        self.fleet = Fleet(
            lease_s=config.lease_ms / 1000, breaker=config.breaker(), backlog=config.engine_backlog
        )
        self.admission = Admission(
            AdmissionLimits(config.max_live_sequences, config.max_live_tokens, config.retry_after_ms)
        )
        self.metrics = RouterMetrics(registry or CollectorRegistry())
        self._health = EngineHealth(self.metrics, on_change=self._fleet_changed)
        self.kv_index: KvIndex[Engine] = KvIndex(config.kv_index_blocks)
        self.receipts = ReceiptBook(config.receipts)
        self.dispatcher = Dispatcher(
            self.admission,
            self._placer(rng or random.Random()),
            self.metrics,
            self._health,
            spec_limits=SpecLimits(config.max_request_tokens),
            queue_options=config.queues(),
            poison=PoisonBook(config.poisoned_requests(), self.metrics.poisoned.inc),
            abort_timeout_s=config.abort_timeout_s,
        )
        self.sessions = Sessions(
            self.fleet,
            self.dispatcher,
            max_sessions=config.max_sessions,
            max_unread=config.max_session_unread,
        )
        self._membership = Membership(
            self.fleet,
            self.dispatcher,
            self.metrics,
            self._health,
            max_engines=config.max_engines,
            on_change=self._fleet_changed,
        )
        self._stalls = StallWatch(
            self.fleet,
            self.dispatcher,
            self._health,
            self.metrics,
            limit_s=config.stall_s,
            on_change=self._fleet_changed,
        )
        self.client_watch = ReaderWatch(config.slow_reader_s)
        self._engine_watch = ReaderWatch(config.lease_ms / 1000)
        self._server = RpcServer.from_config(config, ACCESS)
        self._periodic = PeriodicTasks()
        self._add_services()
        self._add_gauges()

    def _placer(self, rng: random.Random) -> SplitPlacer:
        config = self._config
        options = config.placement_options()
        chosen = {config.placement, *config.placements().values()}
        policies = {name: policy_named(name, rng, options) for name in chosen}
        placer = Placer(
            self.fleet,
            policies[config.placement],
            policies={model: policies[name] for model, name in config.placements().items()},
            retry_after_ms=config.retry_after_ms,
            prefixes=Prefixes(self.kv_index, max_remembered=config.kv_memory_blocks),
            receipts=self.receipts,
        )
        return SplitPlacer(placer, min_handover_tokens=config.handover_min_tokens)

    async def start(self) -> tuple[str, ...]:
        """Listen and serve. Returns the bound addresses. Raises what RpcServer.start raises."""
        bound = await self._server.start()
        self._start_periodic_tasks()
        self._server.health.set(SERVICE, True)
        return bound

    async def drain(self) -> None:
        """Admit nothing more, wait up to `drain_s` for what is live, end the rest with a retryable error."""
        self._server.begin_drain()
        self.admission.drain()
        self.sessions.drain(round(self._config.drain_s * 1000))
        self.dispatcher.lifecycle.close(SHUTTING_DOWN)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.drain_s):
                # Ends are many and a drain is rare: looking now and then costs less than telling each time.
                while self.admission.live_sequences:  # noqa: ASYNC110
                    await asyncio.sleep(IDLE_POLL_S)
        if given_up := self._membership.give_up_all(SHUTTING_DOWN):
            _log.warning("sequences did not end in time", ended=given_up, drain_s=self._config.drain_s)

    async def stop(self) -> None:
        """End all streams and what still runs on them."""
        self.admission.drain()
        self.sessions.close_all(AbortCause.DRAIN)
        self._membership.leave_all()
        await self._server.stop(STOP_GRACE_S)
        await self._periodic.stop()

    def _fleet_changed(self) -> None:
        self.sessions.changed()
        self.dispatcher.lifecycle.fleet_changed()

    def _start_periodic_tasks(self) -> None:
        limits = (self._config.lease_ms / 1000, self._config.slow_reader_s, self._config.stall_s)
        period = min(SWEEP_PERIOD_S, min(limits) / 4)
        self._periodic.start(
            PeriodicTask("leases", period, self._membership.sweep, judges=True),
            PeriodicTask("stalls", period, self._stalls.sweep, judges=True),
            PeriodicTask("breakers", period, lambda: self._health.sweep(self.fleet)),
            PeriodicTask("aborts", period, self.dispatcher.sweep, judges=True),
            PeriodicTask("queue", QUEUE_PERIOD_S, self.dispatcher.lifecycle.tick),
            PeriodicTask("shed", SHED_PERIOD_S, self.sessions.shed),
            PeriodicTask("client readers", period, self.client_watch.sweep, judges=True),
            PeriodicTask("engine readers", period, self._engine_watch.sweep, judges=True),
            PeriodicTask("models", MODELS_PERIOD_S, self.sessions.tick),
            # Twice in the time that was promised, so that a late one still keeps it.
            PeriodicTask("heartbeat", self._config.heartbeat_s / 2, self.sessions.beat),
        )

    def _add_services(self) -> None:
        config = self._config
        streams = SessionStreams(
            self.sessions,
            self.client_watch,
            router_instance_id=self.instance_id,
            heartbeat_ms=round(config.heartbeat_s * 1000),
            hello_timeout_s=config.hello_timeout_s,
        )
        router = RouterServicer(
            self.fleet,
            self.admission,
            self.dispatcher,
            self.sessions,
            streams,
            GenerateCalls(
                self.dispatcher,
                self.client_watch,
                config.resume_policy(),
                self.metrics.resumed,
            ),
            self.kv_index,
            self.receipts,
            self._membership,
            router_instance_id=self.instance_id,
        )
        terms = AttachTerms(
            self.instance_id, config.lease_ms, config.report_interval_ms, config.hello_timeout_s
        )
        kv = KvStreams(
            self.fleet,
            self.dispatcher.link_of,
            self.kv_index,
            self.metrics,
            hello_timeout_s=config.hello_timeout_s,
            max_resyncs=config.max_kv_resyncs,
        )
        fleet = FleetServicer(self._membership, self._engine_watch, terms, kv)
        router_pb2_grpc.add_RouterServiceServicer_to_server(router, self._server.grpc)
        engine_pb2_grpc.add_FleetServiceServicer_to_server(fleet, self._server.grpc)

    def _add_gauges(self) -> None:
        self.metrics.lanes.watch(self.dispatcher.lifecycle.lanes)
        self.metrics.placements.watch(self.receipts)
        self.metrics.watch(
            self.fleet,
            {
                "live_sequences": (
                    "Sequences admitted and not ended.",
                    lambda: self.admission.live_sequences,
                ),
                "live_tokens": ("Prompt tokens of live sequences.", lambda: self.admission.live_tokens),
                "indexed_blocks": (
                    "Cached blocks of engines that are known here, once for each engine.",
                    lambda: self.kv_index.pairs,
                ),
                "resumed_sequences": (
                    "Sequences submitted after they had lost an engine or a router, since the start.",
                    lambda: self.dispatcher.lifecycle.resumed,
                ),
                "sessions": ("Gateways connected.", lambda: len(self.sessions)),
            },
        )


async def serve(config: RouterConfig, stop: asyncio.Event) -> int:
    """Run a router until `stop` is set, then drain and end it. Returns the exit code."""
    configure_logging(level=config.log_level, fmt=config.log_format, service="router")
    configure_tracing("router")
    for line in unknown_variables(os.environ, ["CATENARY_ROUTER_"]):
        _log.warning(line)
    router = Router(config, registry=REGISTRY)
    await router.start()
    mark_started()
    await stop.wait()
    await router.drain()
    await router.stop()
    return 0
