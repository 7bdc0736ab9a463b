"""`python -m services.router` as a process: what it imports, how much it holds, how it starts and ends."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from catenary.rpc import error_of, open_channel
from catenary.schema import SCHEMA_REVISION
from catenary.v1 import common_pb2, router_pb2, router_pb2_grpc
from tests.support.router_fakes import FakeEngine, expected, spec, until

RSS_LIMIT_MIB = 150


class RouterProcess:
    """A router on a unix socket in its own process."""

    def __init__(self, directory: Path, secrets, *flags: str) -> None:
        self.address = f"unix:{directory}/router.sock"
        self.log = directory / "router.log"
        self.secrets = secrets
        command = [sys.executable, "-m", "services.router", "--listen", self.address]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen([*command, *secrets.flags, *flags], stdout=log, stderr=log)

    async def health(self, service: str = "catenary.v1.RouterService") -> int | None:
        async with open_channel(self.address, secret=None) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            try:
                answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=2)
            except grpc.aio.AioRpcError:
                return None
            return answer.status

    async def __aenter__(self) -> RouterProcess:
        async with asyncio.timeout(20):
            while await self.health() != health_pb2.HealthCheckResponse.SERVING:
                assert self.process.poll() is None, self.log.read_text()
                await asyncio.sleep(0.05)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        await self.wait()

    async def wait(self) -> int:
        return await asyncio.to_thread(self.process.wait, 20)

    def rss_mib(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert found
        return int(found[1]) / 1024


async def opened(stub):
    """A session after its welcome."""
    session = stub.Session()
    hello = router_pb2.SessionHello(schema_revision=SCHEMA_REVISION, minimum_peer_revision=1, instance_id="g")
    await session.write(router_pb2.SessionRequest(hello=hello))
    assert (await session.read()).HasField("welcome")
    return session


def output_of(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()


def engine_at(router: RouterProcess, **options) -> FakeEngine:
    return FakeEngine(router.address, secret=router.secrets.engine, **options)


def test_the_router_imports_neither_torch_nor_a_service_beside_it():
    code = (
        "import sys, services.router.app, services.router.__main__\n"
        "bad = ('torch', 'transformers', 'tokenizers', 'fastapi', 'services.engine', 'gateway')\n"
        "print([name for name in sys.modules if name.startswith(bad)])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


def test_the_pure_cores_import_no_grpc():
    code = (
        "import sys, services.router.fleet, services.router.placement, services.router.admission\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('grpc', 'torch')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


async def test_a_loaded_router_stays_small(run_dir, secrets):
    async with (
        RouterProcess(run_dir, secrets) as router,
        engine_at(router, name="a"),
        engine_at(router, name="b"),
        open_channel(router.address, secret=secrets.client) as channel,
    ):
        stub = router_pb2_grpc.RouterServiceStub(channel)

        async def answer(number: int) -> list[int]:
            call = stub.Generate(router_pb2.GenerateRequest(spec=spec([number] * 500, max_tokens=50)))
            return [token async for part in call for token in part.token_ids]

        answers = await asyncio.gather(*[answer(number) for number in range(300)])
        assert answers[17] == expected([17] * 500, max_tokens=50)
        assert all(len(tokens) == 50 for tokens in answers)
        assert router.rss_mib() < RSS_LIMIT_MIB
        fleet = await stub.GetFleet(router_pb2.GetFleetRequest())
        assert fleet.live_sequences == 0
        assert all(engine.placed_sequences == 0 for engine in fleet.engines)


@pytest.mark.advisory("CVE-2025-30202")
async def test_a_gateway_that_never_reads_and_never_stops_asking_fills_nothing(run_dir, secrets):
    async with (
        RouterProcess(run_dir, secrets) as router,
        engine_at(router, name="busy", auto=False, max_running=1) as engine,
        open_channel(router.address, secret=secrets.client) as channel,
    ):
        stub = router_pb2_grpc.RouterServiceStub(channel)
        before = router.rss_mib()
        session = await opened(stub)
        # Four times of what may wait in its lane; the answers to the rest are left where they are.
        for handle in range(1, 4097):
            submit = common_pb2.Submit(handle=handle, spec=spec([handle % 900] * 1000))
            await session.write(router_pb2.SessionRequest(submit=submit))
        fleet = await stub.GetFleet(router_pb2.GetFleetRequest())
        assert sum(lane.queued_sequences for lane in fleet.lanes) <= 1024
        assert fleet.live_sequences <= 1024 + len(engine.live)
        assert router.rss_mib() < before + 60
        session.cancel()
        while (await stub.GetFleet(router_pb2.GetFleetRequest())).live_sequences > len(engine.live):
            continue


async def test_a_drain_finishes_what_is_live_and_admits_nothing(run_dir, secrets):
    async with (
        RouterProcess(run_dir, secrets) as router,
        engine_at(router, auto=False) as engine,
        open_channel(router.address, secret=secrets.client) as channel,
    ):
        stub = router_pb2_grpc.RouterServiceStub(channel)
        call = stub.Generate(router_pb2.GenerateRequest(spec=spec([3], max_tokens=4)))
        session = await opened(stub)
        await until(lambda: engine.live)
        router.process.send_signal(signal.SIGTERM)
        while await router.health() == health_pb2.HealthCheckResponse.SERVING:
            continue
        assert await router.health("") == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(router_pb2.GenerateRequest(spec=spec([4]))).read()
        assert error_of(caught.value).code == common_pb2.ERROR_CODE_DRAINING
        submit = common_pb2.Submit(handle=1, spec=spec([4]))
        await session.write(router_pb2.SessionRequest(submit=submit))
        while not (message := await session.read()).HasField("refusal"):
            continue
        assert message.refusal.error.code == common_pb2.ERROR_CODE_DRAINING
        assert message.refusal.error.retryable
        assert router.process.poll() is None
        await engine.step(4)
        tokens = [token async for part in call for token in part.token_ids]
        assert tokens == expected([3], max_tokens=4)
        assert await router.wait() == 0


async def test_what_outlives_the_drain_is_ended(run_dir, secrets):
    async with (
        RouterProcess(run_dir, secrets, "--drain-s", "0.3") as router,
        engine_at(router, auto=False) as engine,
        open_channel(router.address, secret=secrets.client) as channel,
    ):
        stub = router_pb2_grpc.RouterServiceStub(channel)
        call = stub.Generate(router_pb2.GenerateRequest(spec=spec([3], max_tokens=4)))
        await until(lambda: engine.live)
        await engine.step(1)
        assert len((await call.read()).token_ids) == 1
        session = await opened(stub)
        await session.write(router_pb2.SessionRequest(submit=common_pb2.Submit(handle=1, spec=spec([4]))))
        await until(lambda: len(engine.live) == 2)
        router.process.send_signal(signal.SIGTERM)
        end = (await call.read()).end
        assert (end.error.code, end.error.retryable) == (common_pb2.ERROR_CODE_DRAINING, True)
        # A gateway is told before, and gets an end for each sequence.
        while not (message := await session.read()).HasField("draining"):
            continue
        assert message.draining.deadline_ms == 300
        while not (message := await session.read()).HasField("step"):
            continue
        (end,) = message.step.ends
        assert (end.error.code, end.error.retryable) == (common_pb2.ERROR_CODE_DRAINING, True)
        assert await router.wait() == 0
        assert "Traceback" not in router.log.read_text()


async def test_a_router_that_stood_still_does_not_blame_its_engines(run_dir, secrets):
    async with (
        RouterProcess(
            run_dir, secrets, "--lease-ms", "800", "--report-interval-ms", "50", "--stall-s", "1"
        ) as router,
        engine_at(router, auto=False) as engine,
        open_channel(router.address, secret=secrets.client) as channel,
    ):
        stub = router_pb2_grpc.RouterServiceStub(channel)
        call = stub.Generate(router_pb2.GenerateRequest(spec=spec([3], max_tokens=4)))
        await until(lambda: engine.live)
        router.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(1.5)
        router.process.send_signal(signal.SIGCONT)
        await engine.step(4)
        assert [token async for part in call for token in part.token_ids] == expected([3], max_tokens=4)
        assert (await stub.GetFleet(router_pb2.GetFleetRequest())).engines[0].lease_epoch == 1


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--placement", "nope", "--insecure"], "placement"),
        (["--lease-ms", "0", "--insecure"], "lease-ms"),
        (["--lease-ms", "900", "--insecure"], "lease_ms"),
        (["--no-such-flag"], "no-such-flag"),
        ([], "insecure"),
    ],
)
def test_a_bad_start_is_one_line(starts, flags, named):
    done = starts.run("services.router", "--listen", "127.0.0.1:0", *flags)
    assert done.returncode in (1, 2)
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1
    assert named in lines[0]


async def test_an_address_in_use_is_one_line(run_dir, secrets):
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    command = [sys.executable, "-m", "services.router", "--listen", f"127.0.0.1:{port}", *secrets.flags]
    done = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=60, check=False
    )
    server.close()
    assert done.returncode == 1
    assert str(port) in done.stderr.strip().splitlines()[-1]
    assert "Traceback" not in done.stderr
