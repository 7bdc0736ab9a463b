"""A real tokenizer service in the test's own loop, over gRPC on a unix socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from catenary.rpc import open_channel
from catenary.v1 import tokenizer_pb2 as pb
from catenary.v1.tokenizer_pb2_grpc import TokenizerServiceStub
from services.tokenizer.app import TokenizerService
from services.tokenizer.config import TokenizerConfig
from tests.support.tiny_tokenizer import write_tiny_model

if TYPE_CHECKING:
    from catenary.v1.tokenizer_pb2_grpc import TokenizerServiceAsyncStub

MODEL = "tiny"


@dataclass(frozen=True)
class RunningTokenizer:
    """`target` is what open_channel takes; the service asks for no secret."""

    target: str
    service: TokenizerService
    stub: TokenizerServiceAsyncStub


@asynccontextmanager
async def running_tokenizer(
    directory: Path, *, model_dir: Path | None = None, **options: Any
) -> AsyncIterator[RunningTokenizer]:
    """Serve the tiny model, or `model_dir`, as "tiny" until the block ends. `directory` takes the socket."""
    model = model_dir or write_tiny_model(directory / "model")
    defaults: dict[str, Any] = {"workers": 1, "insecure": True, "served_model_name": MODEL}
    config = TokenizerConfig(
        model_dir=model, listen=(f"unix:{directory}/tokenizer.sock",), **(defaults | options)
    )
    service = TokenizerService(config)
    (target,) = await service.start()
    try:
        async with open_channel(target, secret=None) as channel:
            yield RunningTokenizer(target, service, TokenizerServiceStub(channel))
    finally:
        await service.stop()


def chat_request(*messages: tuple[str, str], model: str = MODEL, **fields: Any) -> pb.RenderRequest:
    """A chat of (role, text)."""
    turns = [pb.ChatMessage(role=role, content=[pb.ContentPart(text=text)]) for role, text in messages]
    return pb.RenderRequest(model=model, chat=pb.ChatInput(messages=turns), **fields)


def completion_request(*prompts: str, model: str = MODEL, **fields: Any) -> pb.RenderRequest:
    """A completion of these prompts."""
    return pb.RenderRequest(model=model, completion=pb.CompletionInput(prompts=prompts), **fields)
