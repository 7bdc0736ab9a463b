"""A client of Catenary's gRPC side, for programs without an event loop."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from catenary.client.async_client import AsyncClient
from catenary.client.options import Answer, GenerateOptions, TextDelta
from catenary.client.text import Messages
from catenary.loop_thread import LoopThread
from catenary.rpc import TlsFiles
from catenary.v1 import router_pb2

T = TypeVar("T")


class Client:
    """As `AsyncClient`, whose methods say more, with calls that wait. Several threads may use it.

    Close it, or use it as a context manager. Ctrl-C, or leaving an iteration, aborts the sequence.
    """

    def __init__(
        self,
        target: str,
        *,
        secret: str | None = None,
        tls: TlsFiles | None = None,
        tokenizer: str | None = None,
        timeout_s: float = 30,
        max_retries: int = 2,
    ) -> None:
        """Connect when first needed; the arguments are those of AsyncClient."""
        self._loop = LoopThread("catenary-client")

        async def made() -> AsyncClient:
            return AsyncClient(
                target,
                secret=secret,
                tls=tls,
                tokenizer=tokenizer,
                timeout_s=timeout_s,
                max_retries=max_retries,
            )

        try:
            self._client = self._loop.run(made())
        except BaseException:
            self._loop.close()
            raise

    def chat(
        self,
        messages: Messages,
        *,
        model: str,
        stop: str | Sequence[str] = (),
        **options: Unpack[GenerateOptions],
    ) -> Answer:
        """Return the answer to a chat."""
        return self._loop.run(self._client.chat(messages, model=model, stop=stop, **options))

    def stream_chat(
        self,
        messages: Messages,
        *,
        model: str,
        stop: str | Sequence[str] = (),
        **options: Unpack[GenerateOptions],
    ) -> Generator[TextDelta, None, None]:
        """Answer a chat as `chat` does, piece by piece."""
        return self._each(self._client.stream_chat(messages, model=model, stop=stop, **options))

    def complete(
        self,
        prompt: str | Sequence[int],
        *,
        model: str,
        stop: str | Sequence[str] = (),
        **options: Unpack[GenerateOptions],
    ) -> Answer:
        """Return the continuation of a text, or of token ids."""
        return self._loop.run(self._client.complete(prompt, model=model, stop=stop, **options))

    def stream_complete(
        self,
        prompt: str | Sequence[int],
        *,
        model: str,
        stop: str | Sequence[str] = (),
        **options: Unpack[GenerateOptions],
    ) -> Generator[TextDelta, None, None]:
        """Continue a text as `complete` does, piece by piece."""
        return self._each(self._client.stream_complete(prompt, model=model, stop=stop, **options))

    def embed(
        self, inputs: Sequence[str | Sequence[int]], *, model: str, dimensions: int | None = None
    ) -> list[list[float]]:
        """Return vectors of texts, or of token ids, in order."""
        return self._loop.run(self._client.embed(inputs, model=model, dimensions=dimensions))

    def tokenize(self, text: str, *, model: str, add_special_tokens: bool | None = None) -> tuple[int, ...]:
        """Return the token ids of plain text."""
        return self._loop.run(self._client.tokenize(text, model=model, add_special_tokens=add_special_tokens))

    def detokenize(
        self, token_ids: Sequence[int], *, model: str, skip_special_tokens: bool | None = None
    ) -> str:
        """Return the text of token ids."""
        return self._loop.run(
            self._client.detokenize(token_ids, model=model, skip_special_tokens=skip_special_tokens)
        )

    def models(self) -> tuple[router_pb2.ServedModel, ...]:
        """Return the models that are served now."""
        return self._loop.run(self._client.models())

    def close(self) -> None:
        """Close the connections. Idempotent."""
        if self._loop.closed:
            return
        self._loop.run(self._client.aclose())
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _each(self, items: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        async def following() -> T | None:
            return await anext(items, None)

        try:
            while (item := self._loop.run(following())) is not None:
                yield item
        finally:
            if not self._loop.closed:
                self._loop.run(_closed(items))


async def _closed(items: AsyncGenerator[Any, None]) -> None:
    await items.aclose()
