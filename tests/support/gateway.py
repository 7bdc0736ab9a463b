"""A whole Catenary for tests: gateway, router and scripted engine in this loop, a tokenizer service beside
it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from catenary_testing.engine import Faults, Rule, Script, ScriptedCapacity, ScriptedModel
from catenary_testing.engine.script import Match, Then
from gateway.app import GatewayApp
from gateway.config import GatewayConfig
from services.router.app import Router
from services.router.config import RouterConfig
from tests.support.engines import ScriptedEngine
from tests.support.http import Answer, Connection, call, request_bytes
from tests.support.secrets import TestSecrets
from tests.support.tiny_tokenizer import (
    ADDED_TOKENS,
    CHATML_TEMPLATE,
    EOS_ID,
    VOCAB_SIZE,
    byte_ids,
    write_tiny_model,
)
from tests.support.waiting import eventually

MODEL = "tiny"
MAX_MODEL_LEN = 1024
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
# Tokens that the hash model never gives: control tokens, and bytes that are no ASCII text.
NOT_PLAIN = (*range(len(ADDED_TOKENS)), *range(256, 256 + 32), *range(256 + 127, 512))


def model(**fields: Any) -> ScriptedModel:
    """The tiny model as the scripted engine claims it."""
    defaults = {"vocab_size": VOCAB_SIZE, "eos_token_ids": (EOS_ID,), "max_model_len": MAX_MODEL_LEN}
    return ScriptedModel(**{**defaults, "avoid": NOT_PLAIN, **fields})


def script(*rules: Rule, capacity: dict[str, Any] | None = None, **fields: Any) -> Script:
    """A script of the tiny model."""
    return Script(
        model=model(**fields.pop("model", {})),
        capacity=ScriptedCapacity(**(capacity or {})),
        rules=rules,
        **fields,
    )


def saying(tokens: Sequence[int] | str, prompt: str | Sequence[int] | None = None, **fields: Any) -> Rule:
    """Answer with these tokens, or with the bytes of this text, one token each; to `prompt` (ids, or a text
    given byte by byte), or to everything.
    """
    ids = tuple(byte_ids(tokens) if isinstance(tokens, str) else tokens)
    if "then" in fields:
        fields["then"] = Then(fields["then"])
    if prompt is None:
        return Rule(match=Match.ANY, tokens=ids, **fields)
    return Rule(prompt=tuple(byte_ids(prompt) if isinstance(prompt, str) else prompt), tokens=ids, **fields)


@contextmanager
def tokenizer_process(
    secrets_dir: Path,
    *,
    flags: Sequence[str] = (),
    chat_template: str = CHATML_TEMPLATE,
    add_bos: bool = False,
    vocabulary: dict[str, Any] | None = None,
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A tokenizer service of the tiny model: its address and its process. `vocabulary`: another
    tokenizer.json.
    """
    secrets = TestSecrets.write(secrets_dir)
    directory = write_tiny_model(secrets_dir / "model", chat_template=chat_template, add_bos=add_bos)
    if vocabulary is not None:
        (directory / "tokenizer.json").write_text(json.dumps(vocabulary))
    target = f"unix:{secrets_dir}/tokenizer.sock"
    command = [
        *(sys.executable, "-m", "services.tokenizer", "--listen", target, "--model-dir", str(directory)),
        *("--served-model-name", MODEL, "--workers", "1", *secrets.flags, *flags),
    ]
    with (secrets_dir / "tokenizer.log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        yield target, process
    finally:
        process.terminate()
        process.wait(20)


@contextmanager
def shared_tokenizer(*flags: str, chat_template: str = CHATML_TEMPLATE) -> Iterator[str]:
    """A tokenizer process in a directory of its own."""
    with (
        tempfile.TemporaryDirectory(prefix="cat-") as directory,
        tokenizer_process(Path(directory), flags=flags, chat_template=chat_template) as running,
    ):
        yield running[0]


class Stack:
    """The running parts, and shorthands for requests."""

    def __init__(self, gateway: GatewayApp, router: Router, engine: ScriptedEngine) -> None:
        self.gateway = gateway
        self.router = router
        self.engine = engine

    @property
    def address(self) -> str:
        """Base URL of the gateway."""
        return self.gateway.address

    @property
    def faults(self) -> Faults:
        """The engine's switch board."""
        return self.engine.faults

    async def post(
        self, path: str, body: Any, headers: dict[str, str] | None = None, **options: Any
    ) -> Answer:
        """POST; `model` is filled in for an object without one."""
        if isinstance(body, dict):
            body = {"model": MODEL, **body}
        return await call(self.address, "POST", path, body, headers, **options)

    async def get(self, path: str, headers: dict[str, str] | None = None) -> Answer:
        """GET."""
        return await call(self.address, "GET", path, None, headers)

    async def chat(self, text: str = "hi", **fields: Any) -> Answer:
        """A chat of one user message."""
        return await self.post(CHAT, {"messages": [{"role": "user", "content": text}], **fields})

    async def complete(self, prompt: Any = "hi", **fields: Any) -> Answer:
        """A completion."""
        return await self.post(COMPLETIONS, {"prompt": prompt, **fields})

    async def open_stream(self, path: str, body: dict[str, Any]) -> Connection:
        """Send a request and leave its answer unread."""
        return await self.open_raw(request_bytes("POST", path, {"model": MODEL, **body}))

    async def open_raw(self, data: bytes) -> Connection:
        """Send bytes on a new connection."""
        connection = await Connection.to(self.address)
        await connection.send(data)
        return connection

    async def alive(self) -> None:
        """ALIVE: a small request answers, /health is good, nothing is left running."""
        answer = await self.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1}, timeout_s=5)
        assert answer.status == 200, answer.body
        assert (await self.get("/health")).status == 200
        await self.idle()

    async def restart_gateway(self) -> None:
        """Stop the gateway and start another with the same options (and another port)."""
        await self.gateway.stop(0)
        self.gateway = GatewayApp(self.gateway.config)
        await self.gateway.start()
        await eventually(lambda: self.gateway.ready, "a ready gateway", timeout_s=30)

    @asynccontextmanager
    async def another_gateway(self) -> AsyncIterator[str]:
        """The base URL of one more gateway with the same options (and another port)."""
        gateway = GatewayApp(self.gateway.config)
        await gateway.start()
        try:
            await eventually(lambda: gateway.ready, "a ready gateway", timeout_s=30)
            yield gateway.address
        finally:
            await gateway.stop(0)

    async def idle(self) -> None:
        """Wait until no part holds anything of any request."""
        await self.engine.idle()
        await eventually(lambda: self.router.admission.live_sequences == 0, "no live sequence in the router")
        requests, session = self.gateway.requests, self.gateway.upstreams.session
        await eventually(lambda: len(requests) == 0 and session.live == 0, "an idle gateway")


@asynccontextmanager
async def running_stack(
    directory: Path, tokenizer: str, engine_script: Script | None = None, **options: Any
) -> AsyncIterator[Stack]:
    """Run everything; `options` are the gateway's, `router` and `engine` those of the others."""
    secrets = TestSecrets.write(directory)
    # All of it shares one loop with the test: a lease must outlive what holds the loop up on a busy machine.
    fast = {"lease_ms": 15_000, "report_interval_ms": 50, **options.pop("router", {})}
    router = Router(RouterConfig(listen=(f"unix:{directory}/router.sock",), **fast, **secrets.options))
    async with AsyncExitStack() as running:
        running.push_async_callback(router.stop)
        (address,) = await router.start()
        engine = ScriptedEngine(
            [address],
            secrets,
            script=engine_script or script(),
            **{
                "served_model_name": MODEL,
                "listen": (f"unix:{directory}/engine.sock",),
                **options.pop("engine", {}),
            },
        )
        running.push_async_callback(engine.stop)
        await engine.start()
        targets = (tokenizer, *options.pop("extra_tokenizers", ()))
        links: dict[str, Any] = {
            "router": address,
            "tokenizer": targets,
            "client_secret_file": secrets.client_file,
        }
        gateway = GatewayApp(GatewayConfig(port=0, **links, **{"drain_s": 1.0, **options}))
        stack = Stack(gateway, router, engine)
        running.push_async_callback(lambda: stack.gateway.stop(0))
        await gateway.start()
        await eventually(lambda: gateway.ready, "a ready gateway", timeout_s=30)
        yield stack
