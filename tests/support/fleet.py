"""Services of a deployment in this process, over real gRPC: a router, scripted engines, a plain client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc

from catenary.rpc import open_channel
from catenary.v1 import common_pb2, engine_pb2, router_pb2, router_pb2_grpc
from catenary_testing.engine import Script
from services.router.app import Router
from services.router.config import RouterConfig
from tests.support.engines import EngineProcess, ScriptedEngine
from tests.support.proxy import LinkProxy
from tests.support.secrets import TestSecrets
from tests.support.waiting import eventually

# Leases short enough to watch, long enough for a loaded machine.
FAST_ROUTER: dict[str, Any] = {"lease_ms": 2000, "report_interval_ms": 100, "drain_s": 2.0}


class Fleet:
    """A router and what is attached to it. `directory` takes the sockets."""

    def __init__(self, directory: Path, secrets: TestSecrets, **router_options: Any) -> None:
        self.directory = directory
        self.secrets = secrets
        options = {
            **FAST_ROUTER,
            **secrets.options,
            "listen": (f"unix:{directory}/r.sock",),
            **router_options,
        }
        self.router = Router(RouterConfig(**options))
        self.engines: list[ScriptedEngine] = []
        self.processes: list[EngineProcess] = []
        self._proxies: list[LinkProxy] = []
        self._channel: grpc.aio.Channel | None = None
        self.router_address = ""

    async def start(self, *, engines: int = 1, script: Script | None = None, **engine_options: Any) -> None:
        """Start the router and so many alike engines, and wait until all serve."""
        (self.router_address,) = await self.router.start()
        for _ in range(engines):
            await self.add_engine(script=script, **engine_options)
        await self.serving(engines)

    async def add_engine(
        self, *, via: LinkProxy | None = None, routers: list[str] | None = None, **options: Any
    ) -> ScriptedEngine:
        """Start one more engine in this process, dialling the router, it through a proxy, or `routers`."""
        options.setdefault("listen", (f"unix:{self.directory}/e{len(self.engines)}.sock",))
        options.setdefault("engine_name", f"engine-{len(self.engines)}")
        routers = routers or [via.address if via else self.router_address]
        engine = ScriptedEngine(routers, self.secrets, **options)
        self.engines.append(engine)
        await engine.start()
        return engine

    def add_process(
        self, *, script: Script | None = None, flags: tuple[str, ...] = (), also: tuple[str, ...] = ()
    ) -> EngineProcess:
        """Start an engine as a process of its own; `also`: further routers that it attaches to."""
        directory = self.directory / f"p{len(self.processes)}"
        directory.mkdir()
        process = EngineProcess(
            [self.router_address, *also], self.secrets, directory, script=script, flags=flags
        )
        self.processes.append(process)
        process.start()
        return process

    async def add_proxy(self) -> LinkProxy:
        """A proxy in front of the router."""
        proxy = LinkProxy(self.directory, self.router_address, f"x{len(self._proxies)}")
        self._proxies.append(proxy)
        await proxy.start()
        return proxy

    async def stop(self) -> None:
        """Stop everything, engines first."""
        for process in self.processes:
            await process.stop()
        for engine in self.engines:
            await engine.stop()
        for proxy in self._proxies:
            await proxy.stop()
        if self._channel is not None:
            await self._channel.close()
        await self.router.stop()

    @property
    def stub(self) -> Any:
        """RouterService as a plain client calls it."""
        if self._channel is None:
            self._channel = open_channel(self.router_address, secret=self.secrets.client)
        return router_pb2_grpc.RouterServiceStub(self._channel)

    async def view(self) -> router_pb2.GetFleetResponse:
        """The fleet as the router sees it."""
        view: router_pb2.GetFleetResponse = await self.stub.GetFleet(router_pb2.GetFleetRequest())
        return view

    def generate(self, spec: common_pb2.SequenceSpec) -> Any:
        """A running Generate call."""
        return self.stub.Generate(router_pb2.GenerateRequest(spec=spec))

    async def answer(self, spec: common_pb2.SequenceSpec) -> tuple[list[int], common_pb2.SequenceEnd]:
        """All tokens of a sequence, and its end. Raises AioRpcError for a refusal."""
        tokens: list[int] = []
        end = common_pb2.SequenceEnd()
        async for response in self.generate(spec):
            tokens.extend(response.token_ids)
            if response.HasField("end"):
                end = response.end
        return tokens, end

    async def serving(self, count: int) -> None:
        """Wait until exactly so many engines take sequences."""
        fleet = self.router.fleet
        state = engine_pb2.ENGINE_STATE_SERVING
        await eventually(
            lambda: sum(engine.state == state for engine in fleet) == count, f"{count} serving engines"
        )

    async def idle(self) -> None:
        """Wait until nothing is live anywhere: no sequence, no block, no placed load."""
        for engine in self.engines:
            await engine.idle()
        await eventually(lambda: self.router.admission.live_sequences == 0, "no live sequence in the router")
        await eventually(
            lambda: all(engine.placed_sequences == 0 for engine in self.router.fleet), "no placed load"
        )
