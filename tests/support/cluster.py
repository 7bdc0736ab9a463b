"""Several routers and engines with one gateway in this loop, to be lost one by one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from catenary_testing.engine import Script
from gateway.app import GatewayApp
from gateway.config import GatewayConfig
from services.router.app import Router
from services.router.config import RouterConfig
from tests.support.engines import ScriptedEngine
from tests.support.gateway import MODEL, script
from tests.support.http import Answer, call
from tests.support.secrets import TestSecrets
from tests.support.waiting import eventually

FAST_ROUTER: dict[str, Any] = {
    "lease_ms": 2000,
    "report_interval_ms": 50,
    "heartbeat_s": 0.3,
    # Engines are killed all the time here.
    "breaker_faults": 1000,
}


class Cluster:
    """`directory` takes the sockets, `options` are the routers'. Every engine dials every router."""

    def __init__(self, directory: Path, secrets: TestSecrets, options: dict[str, Any] | None = None) -> None:
        self.directory = directory
        self.secrets = secrets
        self.routers: list[Router | None] = []
        self.engines: list[ScriptedEngine] = []
        self.gateway: GatewayApp
        self._options = options or {}

    def address(self, index: int) -> str:
        """Where router `index` listens, running or not."""
        return f"unix:{self.directory}/router-{index}.sock"

    async def start_router(self, index: int) -> Router:
        """Start router `index`, for the first time or again."""
        options = {**FAST_ROUTER, **self._options, **self.secrets.options}
        router = Router(RouterConfig(listen=(self.address(index),), **options))
        await router.start()
        self.routers[index] = router
        return router

    async def stop_router(self, index: int) -> None:
        """End a router without a drain. Idempotent."""
        router, self.routers[index] = self.routers[index], None
        if router is not None:
            await router.stop()

    async def add_engine(
        self, engine_script: Script, addresses: Sequence[str], **options: Any
    ) -> ScriptedEngine:
        """Start one more engine."""
        number = len(self.engines)
        options.setdefault("listen", (f"unix:{self.directory}/engine-{number}.sock",))
        engine = ScriptedEngine(
            addresses,
            self.secrets,
            script=engine_script,
            served_model_name=MODEL,
            engine_name=f"engine-{number}",
            **options,
        )
        self.engines.append(engine)
        await engine.start()
        return engine

    @property
    def running(self) -> list[Router]:
        """Routers that run."""
        return [router for router in self.routers if router is not None]

    @property
    def busy(self) -> list[ScriptedEngine]:
        """Engines that run sequences."""
        return [engine for engine in self.engines if engine.app.frontend.load().running]

    async def post(self, path: str, body: dict[str, Any], **options: Any) -> Answer:
        """POST; the model is filled in."""
        return await call(self.gateway.address, "POST", path, {"model": MODEL, **body}, **options)

    async def metric(self, name: str) -> float:
        """The sum of a metric of the gateway over all labels."""
        page = (await call(self.gateway.address, "GET", "/metrics")).body.decode()
        lines = [line for line in page.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    async def serving(self) -> None:
        """Wait until every running router sees every engine serve, and the gateway is connected to them."""

        def all_there() -> bool:
            seen = [[engine.serving for engine in router.fleet] for router in self.running]
            return seen == [[True] * len(self.engines)] * len(seen)

        await eventually(all_there, "serving engines at every router")
        session = self.gateway.upstreams.session
        await eventually(lambda: session.connected == len(self.running), "a session with every router")
        await eventually(lambda: self.gateway.ready, "a ready gateway", timeout_s=30)

    async def idle(self) -> None:
        """Wait until no part holds anything of any request."""
        for engine in self.engines:
            await engine.idle()
        admissions = [router.admission for router in self.running]
        await eventually(lambda: not any(one.live_sequences for one in admissions), "idle routers")
        requests, session = self.gateway.requests, self.gateway.upstreams.session
        await eventually(lambda: len(requests) == 0 and session.live == 0, "an idle gateway")


@asynccontextmanager
async def running_cluster(
    directory: Path,
    tokenizer: str,
    engine_script: Script | None = None,
    *,
    routers: int = 1,
    engines: int = 2,
    router: dict[str, Any] | None = None,
    engine: dict[str, Any] | None = None,
    dialled: Sequence[str] = (),
    **options: Any,
) -> AsyncIterator[Cluster]:
    """Run everything; `options` are the gateway's. `dialled`: what the gateway dials in place of the routers'
    own addresses."""
    cluster = Cluster(directory, TestSecrets.write(directory), router)
    cluster.routers = [None] * routers
    async with AsyncExitStack() as stack:
        for index in range(routers):
            stack.push_async_callback(cluster.stop_router, index)
            await cluster.start_router(index)
        addresses = [cluster.address(index) for index in range(routers)]
        for _ in range(engines):
            made = await cluster.add_engine(engine_script or script(), addresses, **(engine or {}))
            stack.push_async_callback(made.stop)
        given: dict[str, Any] = {"drain_s": 1.0, "router_silence_s": 1.0, "connect_timeout_s": 1.0, **options}
        cluster.gateway = GatewayApp(
            GatewayConfig(
                port=0,
                router=tuple(dialled or addresses),
                tokenizer=(tokenizer,),
                client_secret_file=cluster.secrets.client_file,
                **given,
            )
        )
        stack.push_async_callback(lambda: cluster.gateway.stop(0))
        await cluster.gateway.start()
        await cluster.serving()
        yield cluster
