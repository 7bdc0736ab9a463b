"""HTTPS in front of the gateway, TLS and mutual TLS behind it."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from catenary.rpc import TlsFiles
from catenary.runtime import StartRefused
from gateway.app import GatewayApp
from gateway.config import GatewayConfig
from services.router.app import Router
from services.router.config import RouterConfig
from services.tokenizer.app import TokenizerService
from services.tokenizer.config import TokenizerConfig
from tests.support.certificates import make_authority, make_certificate
from tests.support.engines import ScriptedEngine
from tests.support.gateway import COMPLETIONS, MODEL, script
from tests.support.http import Connection, call, request_bytes
from tests.support.secrets import TestSecrets
from tests.support.stack_fixtures import StartStack
from tests.support.tiny_tokenizer import write_tiny_model
from tests.support.waiting import eventually

Certificates = dict[str, TlsFiles]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    directory = tmp_path_factory.mktemp("tls")
    for authority in ("authority", "stranger"):
        make_authority(directory, authority)
    names = ("server", "catenary-client", "catenary-engine")
    made = {name: make_certificate(directory, name, "authority") for name in names}
    made["forged"] = make_certificate(directory, "catenary-forged", "stranger")
    return made


async def ask(address: str, context: ssl.SSLContext) -> Any:
    """The events of a streamed completion over HTTPS. Raises OSError if the server does not want us."""
    port = int(address.rsplit(":", 1)[1])
    connection = Connection(*await asyncio.open_connection("127.0.0.1", port, ssl=context))
    try:
        body = {"model": MODEL, "prompt": "x", "stream": True}
        await connection.send(request_bytes("POST", COMPLETIONS, body))
        return (await connection.answer()).events
    finally:
        connection.close()


def trusting(files: TlsFiles) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=files.ca)


async def test_https(start_stack: StartStack, certificates: Certificates) -> None:
    server = certificates["server"]
    stack = await start_stack(ssl_certfile=server.cert, ssl_keyfile=server.key)
    assert stack.address.startswith("https://127.0.0.1:")
    assert (await ask(stack.address, trusting(server)))[-1] == "[DONE]"


async def test_https_with_client_certificates(start_stack: StartStack, certificates: Certificates) -> None:
    server = certificates["server"]
    stack = await start_stack(ssl_certfile=server.cert, ssl_keyfile=server.key, ssl_ca_certs=server.ca)
    for name, welcome in (("catenary-client", True), ("forged", False), (None, False)):
        context = trusting(server)
        if name is not None:
            files = certificates[name]
            assert files.cert is not None
            context.load_cert_chain(files.cert, files.key)
        if welcome:
            assert (await ask(stack.address, context))[-1] == "[DONE]"
        else:
            with pytest.raises((OSError, asyncio.IncompleteReadError)):
                await ask(stack.address, context)


async def test_https_files_that_cannot_be_used(certificates: Certificates, tmp_path: Path) -> None:
    server, other, locked = certificates["server"], certificates["forged"], tmp_path / "locked.key"
    command = ["openssl", "ec", "-in", str(server.key), "-out", str(locked), "-aes128", "-passout", "pass:x"]
    await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"ssl_certfile": server.cert, "ssl_keyfile": other.key}, "--ssl-certfile, --ssl-keyfile"),
        ({"ssl_certfile": server.cert, "ssl_keyfile": locked}, "--ssl-certfile, --ssl-keyfile"),
        (
            {"ssl_certfile": server.cert, "ssl_keyfile": server.key, "ssl_ca_certs": server.key},
            "--ssl-ca-certs",
        ),
    ]
    for options, words in refused:
        with pytest.raises(StartRefused, match=words):
            GatewayApp(GatewayConfig(port=0, **options))


@asynccontextmanager
async def services(
    directory: Path, certificates: Certificates, *, mutual: bool
) -> AsyncIterator[tuple[str, str]]:
    """Router, engine and tokenizer over TLS on TCP: the addresses of router and tokenizer."""
    secrets = TestSecrets.write(directory)
    server, engine = certificates["server"], certificates["catenary-engine"]
    options: dict[str, Any] = {
        "listen": ("127.0.0.1:0",),
        "tls_cert": server.cert,
        "tls_key": server.key,
        "tls_ca": server.ca,
        "tls_require_client_cert": mutual,
        **({} if mutual else secrets.options),
    }
    router = Router(RouterConfig(**options))
    model = write_tiny_model(directory / "model")
    tokenizer = TokenizerService(
        TokenizerConfig(model_dir=model, served_model_name=MODEL, workers=1, **options)
    )
    async with AsyncExitStack() as running:
        running.push_async_callback(router.stop)
        (router_address,) = await router.start()
        scripted = ScriptedEngine(
            [router_address],
            secrets,
            script=script(),
            served_model_name=MODEL,
            listen=(f"unix:{directory}/engine.sock",),
            tls_ca=engine.ca,
            **({"tls_cert": engine.cert, "tls_key": engine.key} if mutual else {}),
        )
        running.push_async_callback(scripted.stop)
        await scripted.start()
        running.push_async_callback(tokenizer.stop)
        (tokenizer_address,) = await tokenizer.start()
        yield router_address, tokenizer_address


@pytest.mark.parametrize("mutual", [False, True], ids=["tls", "mutual"])
async def test_router_and_tokenizer_over_tls(run_dir: Path, certificates: Certificates, mutual: bool) -> None:
    client = certificates["catenary-client"]
    async with services(run_dir, certificates, mutual=mutual) as (router, tokenizer):
        links: dict[str, Any] = {"router": router, "tokenizer": (tokenizer,)}
        links["client_secret_file"] = None if mutual else run_dir / "client-secret"
        own: dict[str, Any] = {"tls_cert": client.cert, "tls_key": client.key} if mutual else {}
        gateway = GatewayApp(GatewayConfig(port=0, tls_ca=client.ca, **links, **own))
        await gateway.start()
        try:
            await eventually(lambda: gateway.ready, "a ready gateway", timeout_s=30)
            body = {"model": MODEL, "prompt": "text", "max_tokens": 3}
            answer = await call(gateway.address, "POST", COMPLETIONS, body)
            assert (answer.status, answer.json()["usage"]["completion_tokens"]) == (200, 3)
        finally:
            await gateway.stop(0)
        await _stays_away(links)
        await _stays_away(links | {"tls_ca": certificates["forged"].ca} | own)


async def _stays_away(options: dict[str, Any]) -> None:
    """A gateway that speaks no TLS, or trusts somebody else, gets no session."""
    gateway = GatewayApp(GatewayConfig(port=0, connect_timeout_s=1.0, **options))
    with capture_logs() as logs:
        await gateway.start()
        try:
            await eventually(
                lambda: sum(line["event"] == "no router session" for line in logs) > 1,
                "two failed attempts",
                timeout_s=10,
            )
            assert not gateway.ready
        finally:
            await gateway.stop(0)
