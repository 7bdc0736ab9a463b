"""Health, reflection, keepalive, draining and the end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from catenary.rpc import RpcConfig, RpcServer, error_of, open_channel
from catenary.runtime import StartRefused
from catenary.v1 import common_pb2, router_pb2, router_pb2_grpc
from tests.support.rpc_fakes import ACCESS, SECRETS, serving
from tests.support.waiting import eventually

ROUTER = "catenary.v1.RouterService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def health(channel: grpc.aio.Channel, service: str) -> Any:
    stub = health_pb2_grpc.HealthStub(channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)).status


async def test_health_needs_no_secret_and_tells_liveness_from_readiness() -> None:
    async with serving() as running, open_channel(running.target, secret=None) as channel:
        assert await health(channel, "") == SERVING
        assert await health(channel, ROUTER) == NOT_SERVING
        running.server.health.set(ROUTER, True)
        assert await health(channel, ROUTER) == SERVING
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await health(channel, "nobody")
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        states = await health_pb2_grpc.HealthStub(channel).List(health_pb2.HealthListRequest())
        assert states.statuses[ROUTER].status == SERVING


async def test_a_watcher_sees_changes_and_is_let_go_at_the_end() -> None:
    async with serving() as running, open_channel(running.target, secret=None) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=ROUTER))
        assert (await watch.read()).status == NOT_SERVING
        running.server.health.set(ROUTER, True)
        assert (await watch.read()).status == SERVING
        last = asyncio.ensure_future(watch.read())
        async with asyncio.timeout(5):
            await running.server.stop(60)
        assert (await last).status == NOT_SERVING
        assert await watch.read() is grpc.aio.EOF


async def test_watchers_are_limited() -> None:
    async with serving() as running, open_channel(running.target, secret=None) as channel:
        request = health_pb2.HealthCheckRequest(service=ROUTER)
        stub = health_pb2_grpc.HealthStub(channel)
        watches = [stub.Watch(request) for _ in range(64)]
        for watch in watches:
            await watch.read()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Watch(request).read()
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for watch in watches:
            watch.cancel()
        assert await health(channel, "") == SERVING


async def test_reflection_lists_and_describes_the_services_to_those_with_a_role() -> None:
    ask = reflection_pb2.ServerReflectionRequest
    async with serving() as running:
        async with open_channel(running.target, secret="engine-secret") as channel:
            requests = [ask(list_services=""), ask(file_containing_symbol=ROUTER)]
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            answers = [answer async for answer in stub.ServerReflectionInfo(iter(requests))]
            names = {service.name for service in answers[0].list_services_response.service}
            assert {ROUTER, "catenary.v1.FleetService", "grpc.health.v1.Health"} <= names
            assert answers[1].file_descriptor_response.file_descriptor_proto
        async with open_channel(running.target, secret=None) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([])).read()
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_the_order_of_a_drain() -> None:
    async with serving() as running, open_channel(running.target, secret="client-secret") as channel:
        server, router = running.server, running.router
        server.health.set(ROUTER, True)
        stub = router_pb2_grpc.RouterServiceStub(channel)
        running_call = asyncio.ensure_future(stub.ListModels(router_pb2.ListModelsRequest()))
        await asyncio.wait_for(router.started.wait(), 10)

        # 1. Not ready any more, for good; alive still.
        drain = asyncio.create_task(server.drain(30))
        await eventually(lambda: server.health.get(ROUTER) is False, "not ready")
        server.health.set(ROUTER, True)
        assert await health(channel, ROUTER) == NOT_SERVING
        assert await health(channel, "") == SERVING
        # 2. New calls are refused with a reason.
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.GetFleet(router_pb2.GetFleetRequest())
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert error_of(refused.value).code == common_pb2.ERROR_CODE_DRAINING
        assert error_of(refused.value).retryable
        # 3. What runs may finish, and ends the drain.
        assert not drain.done()
        router.release.set()
        assert (await running_call).models
        assert await asyncio.wait_for(drain, 10) is True
        # 4. The end.
        await server.stop(0)
        with pytest.raises(grpc.aio.AioRpcError):
            await health(channel, "")


async def test_a_drain_gives_up_after_its_grace_and_the_stop_cancels() -> None:
    async with serving() as running, open_channel(running.target, secret="client-secret") as channel:
        spec = common_pb2.SequenceSpec(model="endless")
        call = router_pb2_grpc.RouterServiceStub(channel).Generate(router_pb2.GenerateRequest(spec=spec))
        read = asyncio.ensure_future(call.read())
        await asyncio.wait_for(running.router.started.wait(), 10)
        assert await running.server.drain(0.05) is False
        await running.server.stop(0.05)
        await asyncio.wait_for(running.router.closed.wait(), 10)
        with pytest.raises(grpc.aio.AioRpcError):
            await read


async def test_calls_are_limited_and_health_is_not() -> None:
    async with (
        serving(max_calls=1) as running,
        open_channel(running.target, secret="client-secret") as channel,
    ):
        stub = router_pb2_grpc.RouterServiceStub(channel)
        first = asyncio.ensure_future(stub.ListModels(router_pb2.ListModelsRequest()))
        await asyncio.wait_for(running.router.started.wait(), 10)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.GetFleet(router_pb2.GetFleetRequest())
        assert error_of(refused.value).code == common_pb2.ERROR_CODE_OVERLOADED
        assert "1, max_calls" in error_of(refused.value).message
        assert await health(channel, "") == SERVING
        running.router.release.set()
        await first
        await eventually(lambda: running.server.calls.in_flight == 0, "the call has left")
        assert await stub.GetFleet(router_pb2.GetFleetRequest())


async def stays_ready(channel: grpc.aio.Channel, seconds: float) -> bool:
    """Whether an idle channel keeps its connection all the time."""
    await asyncio.wait_for(channel.channel_ready(), 10)
    try:
        async with asyncio.timeout(seconds):
            await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
    except TimeoutError:
        return True
    return False


async def test_pings_on_an_idle_channel_are_not_called_abuse() -> None:
    # Twelve pings: a server that counts them as strikes goes away after the third.
    async with (
        serving(keepalive_s=0.25) as running,
        open_channel(running.target, secret=None, keepalive_s=0.25) as channel,
    ):
        assert await stays_ready(channel, 3.0)


async def test_the_wrong_option_name_would_be_noticed() -> None:
    """The other half of the test before: the same pings, with the name that C-core does not know."""
    wrong = (("grpc.http2.min_recv_ping_interval_without_data_ms", 100),)
    server = grpc.aio.server(options=(*wrong, ("grpc.keepalive_permit_without_calls", 0)))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with open_channel(f"127.0.0.1:{port}", secret=None, keepalive_s=0.25) as channel:
            assert not await stays_ready(channel, 10.0)
    finally:
        await server.stop(0)


async def test_a_metrics_page_on_a_port_of_its_own() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.listen()
        server = RpcServer(
            listen=["127.0.0.1:0"],
            secrets=SECRETS,
            insecure=False,
            access=ACCESS,
            metrics=("127.0.0.1", port),
        )
        with pytest.raises(StartRefused, match="metrics cannot listen"):
            await server.start()
    config = RpcConfig(listen=("127.0.0.1:0",), insecure=True, metrics_port=port)
    server = RpcServer.from_config(config, ACCESS)
    await server.start()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
        page = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        assert b"catenary_rpc_server_handled_total" in page
    finally:
        await server.stop(0)


async def run_healthcheck(*arguments: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "catenary.rpc.healthcheck", *arguments, stderr=asyncio.subprocess.PIPE
    )
    _, error = await asyncio.wait_for(process.communicate(), 30)
    return process.returncode or 0, error.decode()


async def test_the_healthcheck_command(run_dir: Path) -> None:
    async with serving([f"unix:{run_dir}/h.sock"]) as running:
        assert await run_healthcheck(running.target) == (0, "")
        assert await run_healthcheck(running.target, ROUTER) == (1, f"{running.target}: NOT_SERVING\n")
        running.server.health.set(ROUTER, True)
        assert (await run_healthcheck(running.target, ROUTER))[0] == 0
        target = running.target
    code, error = await run_healthcheck(target)
    assert (code, error) == (1, f"{target}: UNAVAILABLE\n")
    assert (await run_healthcheck("nonsense"))[0] == 1
    assert (await run_healthcheck())[0] == 1


SERVICE = """
import asyncio
from catenary.config import load, settings
from catenary.rpc import RpcConfig, RpcServer
from catenary.runtime import mark_started, run
from catenary.telemetry import configure_logging

class Config(RpcConfig):
    model_config = settings(prefix="CATENARY_SAMPLE_")

async def serve(config, stop):
    server = RpcServer.from_config(config, {})
    print((await server.start())[0], flush=True)
    mark_started()
    await stop.wait()
    await server.drain(config.drain_s)
    await server.stop(0)

config = load(Config, None, prog="sample")
configure_logging(level=config.log_level, fmt=config.log_format, service="sample")
run(lambda stop: serve(config, stop))
"""


def start_service(*flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SERVICE, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "CATENARY_CLIENT_SECRET": "client-secret"},
    )


async def test_a_process_starts_serves_and_ends_on_sigterm(run_dir: Path) -> None:
    process = start_service("--listen", f"unix:{run_dir}/s.sock")
    assert process.stdout is not None
    target = (await asyncio.to_thread(process.stdout.readline)).strip()
    async with open_channel(target, secret=None) as channel:
        assert await health(channel, "") == SERVING
    process.send_signal(signal.SIGTERM)
    _, error = await asyncio.to_thread(process.communicate, timeout=30)
    assert process.returncode == 0, error
    assert not (run_dir / "s.sock").exists()


async def test_a_process_with_its_port_taken_says_so_in_one_line() -> None:
    async with serving() as running:
        process = start_service("--listen", running.target)
        _, error = await asyncio.to_thread(process.communicate, timeout=30)
        assert process.returncode == 1
        assert error.count("\n") == 1
        assert error.endswith(f"cannot listen on {running.target}: the address is in use\n")
