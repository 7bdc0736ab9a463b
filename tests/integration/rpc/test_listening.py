"""Listening on loopback and unix sockets, and what is said when it cannot be."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from catenary.rpc import AddressInUse, RpcServer, open_channel
from catenary.runtime import StartRefused
from tests.support.rpc_fakes import ACCESS, SECRETS, serving

SERVING = health_pb2.HealthCheckResponse.SERVING


def make(*listen: str) -> RpcServer:
    return RpcServer(listen=listen, secrets=SECRETS, insecure=False, access=ACCESS)


async def liveness(target: str) -> Any:
    async with open_channel(target, secret=None) as channel:
        request = health_pb2.HealthCheckRequest()
        return (await health_pb2_grpc.HealthStub(channel).Check(request, timeout=10)).status


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_a_port_in_use_is_one_readable_line(host: str) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"{host}:{other.getsockname()[1]}"
        with pytest.raises(AddressInUse) as error:
            await make(address).start()
        assert str(error.value) == f"cannot listen on {address}: the address is in use"


async def test_two_servers_do_not_share_a_port() -> None:
    async with serving() as running:
        with pytest.raises(AddressInUse):
            await make(running.target).start()


async def test_a_start_that_fails_half_way_leaves_no_socket(run_dir: Path) -> None:
    async with serving() as running:
        with pytest.raises(AddressInUse):
            await make(f"unix:{run_dir}/router.sock", running.target).start()
    assert os.listdir(run_dir) == []


async def test_an_address_that_is_not_ours_is_refused() -> None:
    for address in ("192.0.2.1:0", "no-such-host.invalid:0"):
        with pytest.raises(StartRefused, match="cannot listen on") as error:
            await make(address).start()
        assert "\n" not in str(error.value)


async def test_real_ports_are_reported(run_dir: Path) -> None:
    async with serving(["127.0.0.1:0", "[::1]:0", f"unix:{run_dir}/a.sock"]) as running:
        assert running.addresses[2] == f"unix:{run_dir}/a.sock"
        for address in running.addresses:
            assert not address.endswith(":0")
            assert await liveness(address) == SERVING


async def test_a_unix_socket_gets_a_private_directory_and_is_removed_at_the_end(run_dir: Path) -> None:
    path = run_dir / "made" / "deeper" / "router.sock"
    async with serving([f"unix:{path}"]):
        assert stat.S_IMODE(os.stat(path.parent).st_mode) == 0o700
        assert stat.S_ISSOCK(os.stat(path).st_mode)
    assert os.listdir(path.parent) == []


async def test_a_directory_that_was_there_keeps_its_permissions(run_dir: Path) -> None:
    os.chmod(run_dir, 0o750)
    async with serving([f"unix:{run_dir}/router.sock"]):
        assert stat.S_IMODE(os.stat(run_dir).st_mode) == 0o750


async def test_a_stale_socket_is_replaced_and_a_live_one_is_not(run_dir: Path) -> None:
    path = run_dir / "router.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.exists()
    async with serving([f"unix:{path}"]) as running:
        with pytest.raises(AddressInUse):
            await make(f"unix:{path}").start()
        assert await liveness(running.target) == SERVING


async def test_a_file_in_the_sockets_place_is_kept(run_dir: Path) -> None:
    path = run_dir / "router.sock"
    path.write_text("precious")
    with pytest.raises(StartRefused, match="not a socket"):
        await make(f"unix:{path}").start()
    with pytest.raises(StartRefused, match="cannot listen on"):
        await make(f"unix:{path}/below.sock").start()
    assert path.read_text() == "precious"


async def test_a_server_that_never_started_can_be_stopped() -> None:
    server = make("127.0.0.1:0")
    await server.stop(5)
    await server.stop(5)
