"""Who gets in: secrets, roles, method names, TLS and certificates, against real servers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from catenary.rpc import Role, RpcServer, Secrets, TlsFiles, open_channel
from catenary.runtime import StartRefused
from catenary.v1 import engine_pb2, engine_pb2_grpc, router_pb2, router_pb2_grpc
from tests.support.certificates import make_authority, make_certificate
from tests.support.overtaken import overtaken
from tests.support.rpc_fakes import ACCESS, serving

NO_SECRETS = Secrets(None, None)


async def status(awaitable: Awaitable[Any]) -> grpc.StatusCode:
    """How a call ends, within ten seconds."""
    try:
        async with asyncio.timeout(10):
            await awaitable
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def fleet(channel: grpc.aio.Channel, **kwargs: Any) -> grpc.StatusCode:
    stub = router_pb2_grpc.RouterServiceStub(channel)
    return await status(stub.GetFleet(router_pb2.GetFleetRequest(), **kwargs))


async def attach(channel: grpc.aio.Channel) -> grpc.StatusCode:
    async def talk() -> None:
        call = engine_pb2_grpc.FleetServiceStub(channel).Attach()
        await call.write(engine_pb2.AttachRequest(lease_epoch=5))
        answer = await call.read()
        assert isinstance(answer, engine_pb2.AttachResponse)
        assert answer.attached.lease_epoch == 5
        await call.done_writing()

    async def talk_until_heard() -> None:
        while True:
            try:
                return await talk()
            except grpc.aio.AioRpcError as error:
                if not overtaken(error):
                    raise

    return await status(talk_until_heard())


async def raw(channel: grpc.aio.Channel, method: str) -> grpc.StatusCode:
    call: Any = channel.unary_unary(method)
    return await status(call(b""))


@pytest.mark.parametrize("kind", ["tcp", "unix"])
async def test_each_role_reaches_its_own_services_only(kind: str, run_dir: Path) -> None:
    listen = "127.0.0.1:0" if kind == "tcp" else f"unix:{run_dir}/router.sock"
    async with serving([listen]) as running:
        async with open_channel(running.target, secret="client-secret") as client:
            assert await fleet(client) is grpc.StatusCode.OK
            assert await attach(client) is grpc.StatusCode.PERMISSION_DENIED
        async with open_channel(running.target, secret="engine-secret") as engine:
            assert await attach(engine) is grpc.StatusCode.OK
            assert await fleet(engine) is grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize("secret", [None, "wrong", "client-secre", "client-secret2", "Client-Secret"])
@pytest.mark.advisory("CVE-2026-33186")
async def test_without_the_right_secret_every_method_is_refused(secret: str | None) -> None:
    async with serving() as running, open_channel(running.target, secret=secret) as channel:
        for prefix in ACCESS:
            for name in ("Generate", "Session", "ListModels", "GetFleet", "Attach", "Render", "NoSuchMethod"):
                assert await raw(channel, prefix + name) is grpc.StatusCode.UNAUTHENTICATED
        assert await attach(channel) is grpc.StatusCode.UNAUTHENTICATED
        assert running.server.calls.in_flight == 0


@pytest.mark.advisory("CVE-2026-33186")
async def test_a_stranger_who_sends_nothing_or_too_much_is_refused_at_once() -> None:
    async with serving(max_message_mib=1) as running, open_channel(running.target, secret="x") as channel:
        silent = engine_pb2_grpc.FleetServiceStub(channel).Attach()
        assert await status(silent.read()) is grpc.StatusCode.UNAUTHENTICATED
        call: Any = channel.unary_unary("/catenary.v1.RouterService/GetFleet")
        assert await status(call(b"x" * 900_000)) is grpc.StatusCode.UNAUTHENTICATED


async def test_two_secrets_in_one_call_are_none() -> None:
    async with serving() as running, open_channel(running.target, secret="client-secret") as channel:
        extra = (("authorization", "Bearer client-secret"),)
        assert await fleet(channel, metadata=extra) is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize(
    "method",
    [
        "/catenary.v1.FleetService/../RouterService/GetFleet",
        "//catenary.v1.RouterService/GetFleet",
        "/catenary.v1.RouterService//GetFleet",
        "/catenary.v1.RouterService/GetFleet/",
        "/catenary.v1.RouterService/",
        "/CATENARY.v1.RouterService/GetFleet",
        "/catenary.v1.RouterService%2FGetFleet",
        "/grpc.health.v1.Health/../catenary.v1.RouterService/GetFleet",
        "/catenary.v1.EngineService/GetStatus",
        "/grpc.health.v1.Health",
    ],
)
@pytest.mark.advisory("CVE-2026-33186")
async def test_tricks_with_the_path_reach_nothing(method: str) -> None:
    async with serving() as running:
        async with open_channel(running.target, secret="engine-secret") as engine:
            assert await raw(engine, method) in (
                grpc.StatusCode.PERMISSION_DENIED,
                grpc.StatusCode.UNIMPLEMENTED,
            )
        async with open_channel(running.target, secret=None) as nobody:
            assert await raw(nobody, method) in (
                grpc.StatusCode.UNAUTHENTICATED,
                grpc.StatusCode.UNIMPLEMENTED,
            )


@pytest.mark.advisory("CVE-2025-30202")
async def test_a_server_without_protection_does_not_start_unless_told_to() -> None:
    with pytest.raises(StartRefused, match="insecure"):
        RpcServer(listen=["127.0.0.1:0"], secrets=NO_SECRETS, insecure=False, access=ACCESS)
    async with (
        serving(secrets=NO_SECRETS, insecure=True) as running,
        open_channel(running.target, secret=None) as channel,
    ):
        assert await fleet(channel) is grpc.StatusCode.OK
        assert await attach(channel) is grpc.StatusCode.OK
        unlisted = await raw(channel, "/catenary.v1.EngineService/GetStatus")
        assert unlisted is grpc.StatusCode.PERMISSION_DENIED


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TlsFiles]:
    directory = tmp_path_factory.mktemp("tls")
    for authority in ("authority", "stranger"):
        make_authority(directory, authority)
    made = {
        name: make_certificate(directory, name, "authority")
        for name in ("server", "catenary-client", "catenary-engine", "somebody")
    }
    made["named"] = make_certificate(directory, "named", "authority", "DNS:router.test")
    # Trusts the right authority, but shows a certificate of another one.
    forged = make_certificate(directory, "catenary-forged", "stranger")
    made["forged"] = replace(forged, ca=directory / "authority.pem")
    made["trusting"] = TlsFiles(None, None, directory / "authority.pem")
    made["mistrusting"] = TlsFiles(None, None, directory / "stranger.pem")
    return made


async def test_tls(certificates: dict[str, TlsFiles]) -> None:
    async with serving(tls=certificates["server"]) as running:
        async with open_channel(
            running.target, secret="client-secret", tls=certificates["trusting"]
        ) as channel:
            assert await fleet(channel) is grpc.StatusCode.OK
            assert await attach(channel) is grpc.StatusCode.PERMISSION_DENIED
        async with open_channel(running.target, secret="wrong", tls=certificates["trusting"]) as channel:
            assert await fleet(channel) is grpc.StatusCode.UNAUTHENTICATED
        for tls in (None, certificates["mistrusting"]):
            async with open_channel(running.target, secret="client-secret", tls=tls) as channel:
                assert await fleet(channel) is grpc.StatusCode.UNAVAILABLE


async def test_an_address_of_a_name_shows_the_certificate_of_the_name(
    certificates: dict[str, TlsFiles],
) -> None:
    trusting = certificates["trusting"]
    async with serving(tls=certificates["named"]) as running:
        for name, code in (("router.test", grpc.StatusCode.OK), (None, grpc.StatusCode.UNAVAILABLE)):
            async with open_channel(
                running.target, secret="client-secret", tls=trusting, server_name=name
            ) as channel:
                assert await fleet(channel) is code


async def test_mutual_tls_gives_roles_by_certificate(certificates: dict[str, TlsFiles]) -> None:
    tls = replace(certificates["server"], require_client_cert=True)
    expected = {
        "catenary-client": (grpc.StatusCode.OK, grpc.StatusCode.PERMISSION_DENIED),
        "catenary-engine": (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.OK),
        "somebody": (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNAUTHENTICATED),
        "trusting": (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAVAILABLE),
        "forged": (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAVAILABLE),
    }
    async with serving(secrets=NO_SECRETS, tls=tls) as running:
        for name, (for_client, for_engine) in expected.items():
            async with open_channel(running.target, secret=None, tls=certificates[name]) as channel:
                assert await fleet(channel) is for_client, name
                assert await attach(channel) is for_engine, name


async def test_with_secrets_mutual_tls_is_asked_for_as_well(certificates: dict[str, TlsFiles]) -> None:
    tls = replace(certificates["server"], require_client_cert=True)
    async with serving(tls=tls) as running:
        for name, secret, expected in (
            ("catenary-client", "client-secret", grpc.StatusCode.OK),
            ("catenary-client", None, grpc.StatusCode.UNAUTHENTICATED),
            ("trusting", "client-secret", grpc.StatusCode.UNAVAILABLE),
        ):
            async with open_channel(running.target, secret=secret, tls=certificates[name]) as channel:
                assert await fleet(channel) is expected


async def test_a_unix_socket_stays_plain_beside_tls(certificates: dict[str, TlsFiles], run_dir: Path) -> None:
    listen = ["127.0.0.1:0", f"unix:{run_dir}/s.sock"]
    async with (
        serving(listen, tls=certificates["server"]) as running,
        open_channel(running.addresses[1], secret="client-secret", tls=certificates["trusting"]) as channel,
    ):
        assert await fleet(channel) is grpc.StatusCode.OK


def test_roles_are_two() -> None:
    assert set(Role) == {Role.CLIENT, Role.ENGINE}
