"""Wiring of an engine: status server, frontend, core and router links, and their orderly end."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from prometheus_client import REGISTRY

from catenary.backoff import Backoff
from catenary.config import ConfigError, unknown_variables
from catenary.devices import described
from catenary.rpc import (
    CLIENT_SECRET_ENV,
    ENGINE_SECRET_ENV,
    Role,
    RpcServer,
    TcpAddress,
    open_channel,
    parse_address,
)
from catenary.runtime import mark_started, run
from catenary.schema import MINIMUM_PEER_REVISION, SCHEMA_REVISION
from catenary.telemetry import configure_logging, configure_tracing, get_logger, new_id
from catenary.v1 import engine_pb2, engine_pb2_grpc
from catenary.version import __version__
from services.engine.config import EngineConfig
from services.engine.model import UnknownModelError, resolve_source
from services.engine.options import idle_options
from services.engine.servicer import (
    Core,
    CoreFactory,
    CoreSupervisor,
    DrainOrder,
    EngineCollector,
    EngineFrontend,
    Identity,
    KvPublishing,
    LinkTimes,
    ProcessCore,
    RouterLink,
    RouterLinks,
    SequenceLimits,
    StatusService,
    preloaded,
    spawn_process,
)

log = get_logger("services.engine")

Config = TypeVar("Config", bound=EngineConfig)

_SERVICE = "catenary.v1.EngineService"
_ACCESS = {f"/{_SERVICE}/": frozenset({Role.CLIENT})}
_GOODBYE_S = 3.0
_WATCH_S = 1.0


@dataclass(frozen=True, slots=True)
class CoreDouble:
    """A core that stands in for the configured model and device in tests.

    `name` is the served model's name unless the options give one; `device` and `schema_revision` are what the
    engine tells its routers.
    """

    name: str
    device: str
    factory: CoreFactory
    schema_revision: int = SCHEMA_REVISION


class EngineApp:
    """One engine: its status service, its core, and its links to the routers.

    `core_factory` runs the configured model in another way than in a process of its own; a `double` runs
    another model altogether. Made inside the running loop. Raises StartRefused with one line.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        core_factory: CoreFactory | None = None,
        double: CoreDouble | None = None,
    ) -> None:
        self._config = config
        self._double = double
        self._name = _served_model_name(config, double)
        self.instance_id = new_id("engine-")
        self._server = RpcServer.from_config(config, _ACCESS)
        self.frontend = EngineFrontend(
            stall_limit_s=config.stall_limit_s,
            kept_limit_s=config.kept_limit_s,
            limits=SequenceLimits(
                max_stop_token_ids=config.max_stop_token_ids,
                max_logit_bias=config.max_logit_bias,
                max_bad_words=config.max_bad_words,
                max_bad_word_tokens=config.max_bad_word_tokens,
                max_beam_width=0 if config.contiguous_kv else config.max_beam_width,
                max_beam_numbers=config.max_beam_numbers,
            ),
            remembered_handles=config.remembered_handles,
            role=config.role,
            on_state=self._on_state,
        )
        self.drain_order = DrainOrder(config.drain_s)
        self._supervisor = CoreSupervisor(
            core_factory or (double.factory if double else self._process_cores()),
            self.frontend,
            Backoff(config.core_restart_backoff_s, config.core_restart_backoff_max_s),
            served_model_name=self._name,
            idle_options=lambda task: () if double is not None else idle_options(config, task),
        )
        self.links = RouterLinks(
            config.router,
            self._link,
            self.frontend,
        )
        self._collector = EngineCollector(self.frontend)
        self._task: asyncio.Task[None] | None = None
        self.addresses: tuple[str, ...] = ()

    @property
    def address(self) -> str:
        """The first address of the status service, with its real port."""
        return self.addresses[0]

    @property
    def drain_s(self) -> float:
        """The seconds that an engine has to finish what it runs, unless a router's order says otherwise."""
        return self._config.drain_s

    async def start(self) -> None:
        """Answer for the status, then bring the core up and attach in the background. Raises StartRefused."""
        engine_pb2_grpc.add_EngineServiceServicer_to_server(
            StatusService(self.frontend, self._name), self._server.grpc
        )
        self.addresses = await self._server.start()
        if self._config.metrics_port:
            REGISTRY.register(self._collector)
        self._task = asyncio.create_task(self._run())

    async def finished(self) -> None:
        """Wait until the engine ends by itself: its first core did not come up. Raises StartRefused then."""
        if self._task is not None:
            await asyncio.shield(self._task)

    async def drain(self, cut_short: asyncio.Event) -> None:
        """Take nothing new, and finish what there is by the deadline of the order, or until `cut_short`."""
        self.frontend.drain()
        self._server.begin_drain()
        await first_of(self.frontend.idle(), self.drain_order.over(), cut_short.wait())

    async def stop(self, drain_s: float | None = None) -> None:
        """Drain for up to `drain_s` (default: the option), leave the routers, end the core. Idempotent."""
        self.frontend.drain()
        self._server.begin_drain()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.drain_s if drain_s is None else drain_s):
                await self.frontend.idle()
        self.frontend.give_up()
        self.frontend.routers.close("the engine is shutting down")
        with suppress(TimeoutError):
            async with asyncio.timeout(_GOODBYE_S):
                await self.frontend.routers.all_left()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self._server.stop()
        if self._config.metrics_port:
            with suppress(KeyError):
                REGISTRY.unregister(self._collector)

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._supervisor.run())
            group.create_task(
                self.frontend.watch(
                    min(_WATCH_S, self._config.stall_limit_s / 4, self._config.kept_limit_s / 4)
                )
            )
            group.create_task(self.links.run())

    def _on_state(self, state: engine_pb2.EngineState.ValueType) -> None:
        self._server.health.set(_SERVICE, state == engine_pb2.ENGINE_STATE_SERVING)

    def _process_cores(self) -> CoreFactory:
        config = self._config
        named = config.model_copy(update={"served_model_name": self._name})
        secrets = (CLIENT_SECRET_ENV, ENGINE_SECRET_ENV)
        env = {name: value for name, value in os.environ.items() if name not in secrets}
        if config.device == "cpu":
            try:
                env |= preloaded(config.malloc, env)
            except ValueError as error:
                raise ConfigError(f"--{error}") from None

        def process_core(_restart: bool) -> Core:
            return ProcessCore(
                named.model_dump_json().encode(), stop_s=config.core_stop_s, spawn=spawn_process(env)
            )

        return process_core

    def _link(self, address: str, name: str, attached_elsewhere: Callable[[str], bool]) -> RouterLink:
        config, double = self._config, self._double
        parsed = parse_address(name)
        # A certificate is for the name, whatever it stands for.
        server_name = parsed.host if isinstance(parsed, TcpAddress) and address != name else None
        revision = double.schema_revision if double else SCHEMA_REVISION
        identity = Identity(
            instance_id=self.instance_id,
            engine_name=config.engine_name or socket.gethostname(),
            version=__version__,
            device=double.device if double else config.device,
            served_model_name=self._name,
            role=engine_pb2.EngineRole.Value(f"ENGINE_ROLE_{config.role.upper()}"),
            publish_kv=config.publish_kv,
            schema_revision=revision,
            minimum_peer_revision=min(revision, MINIMUM_PEER_REVISION),
        )
        secret, tls = config.secrets().engine, config.router_tls()
        return RouterLink(
            address,
            lambda target: open_channel(
                target,
                secret=secret,
                tls=tls,
                max_message_mib=config.max_message_mib,
                keepalive_s=config.keepalive_s,
                server_name=server_name,
            ),
            identity,
            self.frontend,
            self.drain_order,
            LinkTimes(
                attach_timeout_s=config.attach_timeout_s,
                orphan_timeout_s=config.orphan_timeout_s,
                backoff_s=config.attach_backoff_s,
                backoff_max_s=config.attach_backoff_max_s,
                refused_backoff_s=config.attach_refused_backoff_s,
            ),
            attached_elsewhere,
            KvPublishing(
                interval_s=config.kv_publish_interval_s,
                max_pending=config.kv_publish_queue,
                resync_interval_s=config.kv_resync_interval_s,
                backoff_s=config.attach_backoff_s,
                backoff_max_s=config.attach_backoff_max_s,
                refused_backoff_s=config.attach_refused_backoff_s,
            ),
        )


def run_engine(config: Config, warnings: Iterable[str], make_app: Callable[[Config], EngineApp]) -> None:
    """Serve with `make_app(config)`, which is called inside the loop, until a signal comes."""
    configure_logging(level=config.log_level, fmt=config.log_format, service="engine")
    configure_tracing("engine")
    for line in (*warnings, *unknown_variables(os.environ, ["CATENARY_ENGINE_"])):
        log.warning(line)
    if chosen := described(config.device):
        log.info(chosen)
    run(lambda stop: serve(make_app(config), stop))


async def serve(app: EngineApp, stop: asyncio.Event) -> int:
    """Run an engine until `stop` is set; the process's exit code. Raises StartRefused."""
    await app.start()
    mark_started()
    order = app.drain_order
    try:
        await first_of(stop.wait(), app.finished(), order.given())
        if not stop.is_set():
            await first_of(app.drain(stop), app.finished())
    finally:
        # A signal leaves its own time at the most, whatever a router allowed.
        await app.stop(min(order.left_s, app.drain_s))
    return 0


async def first_of(*waits: Coroutine[Any, Any, object]) -> None:
    """Wait for one of them. Raises what that one raises."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            await task
    finally:
        for task in tasks:
            task.cancel()


def _served_model_name(config: EngineConfig, double: CoreDouble | None) -> str:
    """Return the name that requests use. Raises ConfigError where the option `model` names nothing."""
    if double is not None:
        return config.served_model_name or double.name
    try:
        name = resolve_source(config.model).name
    except UnknownModelError as error:
        raise ConfigError(f"--model: {error}") from None
    return config.served_model_name or name
