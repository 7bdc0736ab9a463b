"""A whole Catenary of processes for tests: router, tokenizer, engines and gateway, each with its own pid."""

from __future__ import annotations

import asyncio
import shutil
import socket
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from catenary.client import AsyncClient
from catenary.rpc import RpcError
from catenary.v1 import engine_pb2, router_pb2
from tests.support.engines import FAST
from tests.support.http import call
from tests.support.secrets import TestSecrets
from tests.support.service_process import ServiceProcess

# Reports often enough to wait for one; a lease that a loaded machine keeps.
REPORT_INTERVAL_MS = 40
LEASE_MS = 3000
# The gateway waits up to 3 s between two dials of a router.
READY_S = 30.0


@dataclass(frozen=True)
class FurtherModel:
    """A model that is served beside a stack's first one, by one tokenizer and one engine."""

    model_dir: Path
    model: str
    engine_flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class StackPlan:
    """What a stack is made of. The flags are added to the ones that every stack needs."""

    model_dir: Path
    model: str
    engines: int = 1
    routers: int = 1
    engine_flags: tuple[str, ...] = ()
    router_flags: tuple[str, ...] = ()
    tokenizer_flags: tuple[str, ...] = ()
    gateway_flags: tuple[str, ...] = ()
    further: tuple[FurtherModel, ...] = ()


class ProcessStack:
    """The processes of a plan. `directory` takes sockets and logs; its path must be short."""

    def __init__(self, directory: Path, plan: StackPlan) -> None:
        self.plan = plan
        self.secrets = TestSecrets.write(directory)
        self._directory = directory
        self._port = _free_port()
        fast = [f"--{name.replace('_', '-')}={value}" for name, value in FAST.items()]
        self.routers = [
            self._service(
                f"router-{index}" if index else "router",
                "services.router",
                *("--lease-ms", str(LEASE_MS), "--report-interval-ms", str(REPORT_INTERVAL_MS)),
                *("--drain-s", "2", *self.secrets.flags, *plan.router_flags),
            )
            for index in range(plan.routers)
        ]
        self.router = self.routers[0]
        all_routers = ",".join(self.socket(one.name) for one in self.routers)
        self.tokenizer = self._tokenizer("tokenizer", plan.model_dir, plan.model, *plan.tokenizer_flags)
        self.tokenizers = [
            self.tokenizer,
            *(self._tokenizer(f"tokenizer-{one.model}", one.model_dir, one.model) for one in plan.further),
        ]
        models = [(plan.model, plan.engine_flags)] * plan.engines
        models += [(one.model, one.engine_flags) for one in plan.further]
        self.engines = [
            self._service(
                f"engine-{index}",
                "catenary_testing.engine" if "--script" in flags else "services.engine",
                *("--router", all_routers, "--engine-name", f"engine-{index}"),
                *("--served-model-name", name, *fast, *self.secrets.flags, *flags),
            )
            for index, (name, flags) in enumerate(models)
        ]
        self.gateway = ServiceProcess(
            "gateway",
            "gateway",
            (
                *("--port", str(self._port), "--router", all_routers),
                *(f"--tokenizer={self.socket(one.name)}" for one in self.tokenizers),
                *("--drain-s", "2"),
                *(f"--client-secret-file={self.secrets.client_file}", *plan.gateway_flags),
            ),
            directory,
        )

    @property
    def address(self) -> str:
        """Base URL of the gateway."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def services(self) -> tuple[ServiceProcess, ...]:
        """All of them, in the order in which they start."""
        return (*self.routers, *self.tokenizers, *self.engines, self.gateway)

    def socket(self, name: str) -> str:
        """A service's gRPC address."""
        return f"unix:{self._directory}/{name}.sock"

    def start(self) -> None:
        """Start what does not run."""
        for service in self.services:
            service.start()

    def stop(self) -> None:
        """End everything in good order."""
        for service in reversed(self.services):
            service.stop()

    def kill(self) -> None:
        """End everything at once."""
        for service in self.services:
            service.kill()

    def client(self, router: str = "router") -> AsyncClient:
        """A plain gRPC client of a router and the tokenizer."""
        return AsyncClient(
            self.socket(router), secret=self.secrets.client, tokenizer=self.socket("tokenizer"), timeout_s=5
        )

    async def fleet(self, router: str = "router") -> router_pb2.GetFleetResponse | None:
        """The fleet as a router sees it; None if that router is away."""
        async with self.client(router) as client:
            try:
                return await client.fleet()
            except RpcError:
                return None

    async def health(self, path: str = "/health") -> int:
        """Status of a health route; 0 if the gateway is away."""
        try:
            return (await call(self.address, "GET", path, timeout_s=5)).status
        except (OSError, EOFError, TimeoutError):
            return 0

    async def ready(self, *, timeout_s: float = READY_S) -> None:
        """Wait until every service lives, all engines serve, and the gateway says so."""

        async def serving() -> bool:
            for service in self.services:
                if not service.alive:
                    raise AssertionError(f"{service.name} ended:\n{service.tail()}")
            fleets = [await self.fleet(router.name) for router in self.routers]
            return (
                all(fleet is not None and self._complete(fleet) for fleet in fleets)
                and await self.health("/ready") == 200
                and (not self.plan.further or await self._knows_all_models())
            )

        await until(serving, "a stack that serves", timeout_s=timeout_s)

    def _complete(self, fleet: router_pb2.GetFleetResponse) -> bool:
        serving = sum(serves(engine) for engine in fleet.engines)
        return serving == len(fleet.engines) == len(self.engines) and fleet.sessions == 1

    async def _knows_all_models(self) -> bool:
        """Whether the gateway has the tokenizer of each model: it is ready with one of them."""
        for model in (self.plan.model, *(one.model for one in self.plan.further)):
            body = {"model": model, "prompt": "x"}
            if (await call(self.address, "POST", "/tokenize", body)).status != 200:
                return False
        return True

    async def idle(self, *, timeout_s: float = 15.0) -> None:
        """Wait until nothing is live anywhere, by reports that engines made after this call."""
        seen: dict[tuple[str, str, int], int] = {}
        last: router_pb2.GetFleetResponse | None = None

        async def quiet_at(router: str) -> bool:
            nonlocal last
            last = fleet = await self.fleet(router)
            if fleet is None or fleet.live_sequences or not fleet.engines:
                return False
            # One report may be on its way from before the call; the second is not.
            fresh = [
                engine.load.sequence
                >= seen.setdefault((router, engine.instance_id, engine.lease_epoch), engine.load.sequence) + 2
                for engine in fleet.engines
            ]
            return all(fresh) and not any(map(busy, fleet.engines))

        async def quiet() -> bool:
            return all([await quiet_at(router.name) for router in self.routers])

        try:
            await until(quiet, "an idle stack", timeout_s=timeout_s)
        except AssertionError:
            raise AssertionError(f"not idle within {timeout_s:g} s: {last}") from None

    def _tokenizer(self, name: str, model_dir: Path, model: str, *flags: str) -> ServiceProcess:
        options = ("--model-dir", str(model_dir), "--served-model-name", model, "--workers", "1")
        return self._service(name, "services.tokenizer", *options, *self.secrets.flags, *flags)

    def _service(self, name: str, module: str, *flags: str) -> ServiceProcess:
        return ServiceProcess(name, module, ("--listen", self.socket(name), *flags), self._directory)


def serves(engine: router_pb2.FleetEngine) -> bool:
    """Whether the engine takes sequences."""
    return engine.load.state == engine_pb2.ENGINE_STATE_SERVING


def busy(engine: router_pb2.FleetEngine) -> bool:
    """Whether the engine, or the router's account of it, holds anything."""
    load = engine.load
    return any(
        (
            load.running,
            load.waiting,
            load.used_blocks,
            load.pending_prefill_tokens,
            engine.placed_sequences,
            engine.placed_tokens,
        )
    )


async def until(condition: Callable[[], Awaitable[object]], what: str, *, timeout_s: float = 10.0) -> None:
    """Wait until `condition` gives something true. Raises AssertionError that says `what` did not come."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not await condition():
        if asyncio.get_running_loop().time() > deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what}")
        await asyncio.sleep(0.02)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextmanager
def running_stack(plan: Callable[[Path], StackPlan]) -> Iterator[ProcessStack]:
    """The stack that `plan` makes of a new directory, started; both are gone afterwards, whatever happens."""
    directory = Path(tempfile.mkdtemp(prefix="cat-"))
    try:
        stack = ProcessStack(directory, plan(directory))
        stack.start()
        try:
            yield stack
        finally:
            stack.kill()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
