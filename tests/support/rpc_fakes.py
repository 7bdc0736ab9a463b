"""Servicers and servers for the tests of catenary.rpc: they answer with as little as shows what happened."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from catenary.rpc import Role, RpcServer, Secrets, TlsFiles, refuse
from catenary.telemetry import current_traceparent, request_id
from catenary.v1 import (
    common_pb2,
    engine_pb2,
    engine_pb2_grpc,
    router_pb2,
    router_pb2_grpc,
    tokenizer_pb2,
    tokenizer_pb2_grpc,
)

SECRETS = Secrets(client="client-secret", engine="engine-secret")
ACCESS = {
    "/catenary.v1.RouterService/": frozenset({Role.CLIENT}),
    "/catenary.v1.FleetService/": frozenset({Role.ENGINE}),
    "/catenary.v1.TokenizerService/": frozenset({Role.CLIENT}),
}
TOKENIZER = b'{"version": "1.0"}'


class FakeRouter(router_pb2_grpc.RouterServiceServicer):
    """GetFleet tells the request's context; Generate and Session echo; ListModels fails as it is told."""

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.started = asyncio.Event()
        self.release = asyncio.Event()
        self.closed = asyncio.Event()

    async def GetFleet(self, request: Any, context: Any) -> router_pb2.GetFleetResponse:
        return router_pb2.GetFleetResponse(router_instance_id=f"{request_id()} {current_traceparent()}")

    async def ListModels(self, request: Any, context: Any) -> router_pb2.ListModelsResponse:
        if self.failure is not None:
            raise self.failure
        self.started.set()
        await self.release.wait()
        return router_pb2.ListModelsResponse(models=[router_pb2.ServedModel(serving_engines=1)])

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[router_pb2.GenerateResponse]:
        try:
            for token in request.spec.token_ids:
                yield router_pb2.GenerateResponse(token_ids=[token])
            if request.spec.model == "endless":
                self.started.set()
                await asyncio.Event().wait()
            if self.failure is not None:
                raise self.failure
        finally:
            self.closed.set()

    # A coroutine that writes: the other way to answer with a stream.
    async def Session(self, requests: Any, context: Any) -> None:  # type: ignore[override]
        async for request in requests:
            await context.write(
                router_pb2.SessionResponse(refusal=common_pb2.Refusal(handle=request.submit.handle))
            )


class FakeFleet(engine_pb2_grpc.FleetServiceServicer):
    """Attach grants the epoch that it is sent."""

    async def Attach(self, requests: Any, context: Any) -> AsyncIterator[engine_pb2.AttachResponse]:
        async for request in requests:
            yield engine_pb2.AttachResponse(attached=engine_pb2.Attached(lease_epoch=request.lease_epoch))


class FakeTokenizer(tokenizer_pb2_grpc.TokenizerServiceServicer):
    """A token is a code point."""

    async def Render(self, request: Any, context: Any) -> tokenizer_pb2.RenderResponse:
        text = "".join(f"{m.role}:{m.content[0].text};" for m in request.chat.messages)
        if not text:
            raise refuse(common_pb2.ERROR_CODE_INVALID_ARGUMENT, "There are no messages.", param="messages")
        return tokenizer_pb2.RenderResponse(prompts=[tokenizer_pb2.RenderedPrompt(token_ids=map(ord, text))])

    async def Tokenize(self, request: Any, context: Any) -> tokenizer_pb2.TokenizeResponse:
        return tokenizer_pb2.TokenizeResponse(token_ids=map(ord, request.text))

    async def Detokenize(self, request: Any, context: Any) -> tokenizer_pb2.DetokenizeResponse:
        return tokenizer_pb2.DetokenizeResponse(text="".join(map(chr, request.token_ids)))

    async def GetTokenizer(
        self, request: Any, context: Any
    ) -> AsyncIterator[tokenizer_pb2.GetTokenizerResponse]:
        for byte in TOKENIZER:
            yield tokenizer_pb2.GetTokenizerResponse(chunk=bytes([byte]))
        sha256 = "0" * 64 if request.model == "cut" else hashlib.sha256(TOKENIZER).hexdigest()
        digest = tokenizer_pb2.TokenizerDigest(sha256=sha256)
        yield tokenizer_pb2.GetTokenizerResponse(digest=digest)


class RunningServer:
    """A started server with its fakes and bound addresses."""

    def __init__(self, server: RpcServer, router: FakeRouter, addresses: Sequence[str]) -> None:
        self.server = server
        self.router = router
        self.addresses = addresses

    @property
    def target(self) -> str:
        return self.addresses[0]


@asynccontextmanager
async def serving(
    listen: Sequence[str] = ("127.0.0.1:0",),
    *,
    secrets: Secrets = SECRETS,
    insecure: bool = False,
    tls: TlsFiles | None = None,
    **options: Any,
) -> AsyncIterator[RunningServer]:
    """A real server with all fakes, stopped at the end."""
    server = RpcServer(listen=listen, secrets=secrets, insecure=insecure, access=ACCESS, tls=tls, **options)
    # Methods that a fake leaves out answer UNIMPLEMENTED.
    router = FakeRouter()  # type: ignore[abstract]
    router_pb2_grpc.add_RouterServiceServicer_to_server(router, server.grpc)
    engine_pb2_grpc.add_FleetServiceServicer_to_server(FakeFleet(), server.grpc)  # type: ignore[abstract]
    tokenizer = FakeTokenizer()  # type: ignore[abstract]
    tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(tokenizer, server.grpc)
    try:
        yield RunningServer(server, router, await server.start())
    finally:
        await server.stop(0)
