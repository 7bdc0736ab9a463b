"""A client of Catenary's gRPC side, for programs with an event loop."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from catenary.client.connection import Connection
from catenary.client.options import Answer, GenerateOptions, TextDelta, Usage, check_options, make_spec
from catenary.client.text import Messages, TextSide, chat_input
from catenary.rpc import RpcError, TlsFiles
from catenary.text import Detokenizer, StopScanner
from catenary.v1 import common_pb2, router_pb2, tokenizer_pb2


def stop_strings(stop: str | Sequence[str]) -> tuple[str, ...]:
    """Return one stop string, or several, as a tuple. Raises ValueError if one is empty."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(stops):
        raise ValueError("a stop string must not be empty")
    return stops


class TextReader:
    """Decodes one sequence. Text is held back while it may be the beginning of a stop string."""

    def __init__(self, decoder: Detokenizer, stops: Sequence[str], min_tokens: int) -> None:
        """Look for no stop string among the first `min_tokens` tokens."""
        self._decoder = decoder
        self._scanner = StopScanner(stops) if stops else None
        self._min_tokens = min_tokens
        self.tokens = 0
        """Tokens read, up to the one that completed a stop string."""
        self.stopped = False
        """A stop string was found; it is not part of the text."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that the next tokens make certain. What stands behind a stop string is not read."""
        texts = []
        for token_id in token_ids:
            if self.stopped:
                break
            self.tokens += 1
            texts.append(self._scanned(self._decoder.push(token_id)))
        return "".join(texts)

    def finish(self) -> str:
        """Return the rest, once nothing follows."""
        text = self._scanned(self._decoder.flush())
        if self._scanner is None or self.stopped:
            return text
        return text + self._scanner.flush()

    def _scanned(self, text: str) -> str:
        if self._scanner is None or self.tokens <= self._min_tokens or not text:
            return text
        scan = self._scanner.feed(text)
        self.stopped = scan.matched is not None
        return scan.text


# Documents of one `embed` that are under way at a time.
_WINDOW = 32

_REASONS = {common_pb2.FINISH_REASON_STOP: "stop", common_pb2.FINISH_REASON_LENGTH: "length"}


class AsyncClient:
    """Talks to a router and, if given one, to a tokenizer service. Made and used inside of one event loop.

    Every method raises `RpcError`, whose `error` says what was refused, and ValueError if it needs a
    tokenizer and there is none. An option that is not known is a TypeError at the call, and a value
    that no service would take a ValueError. What is refused for now (full, starting, away) is tried again; a
    sequence only as long as it has given nothing. To cancel, cancel the task or leave the iteration: the
    sequence is aborted.
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
        server_name: str | None = None,
    ) -> None:
        """Connect when first needed.

        Args:
            target: the router's address, `host:port` or `unix:/path`.
            secret: the client role's secret.
            tls: files for TLS.
            tokenizer: the tokenizer service's address, for the methods that take or give text.
            timeout_s: limit of each call that does not generate, in seconds.
            max_retries: how often a call that was refused for now is made again.
            server_name: the host name that the router's certificate must have, for a `target` that is an IP
                address.
        """
        self._connection = Connection(
            target,
            secret=secret,
            tls=tls,
            tokenizer=tokenizer,
            timeout_s=timeout_s,
            max_retries=max_retries,
            server_name=server_name,
        )
        self._text = TextSide(self._connection)

    async def chat(
        self,
        messages: Messages,
        *,
        model: str,
        stop: str | Sequence[str] = (),
        **options: Unpack[GenerateOptions],
    ) -> Answer:
        """Return the answer to a chat.

        Args:
            messages: objects with `role` and `content`, as OpenAI's, whose content is text; or one text,
                which a user says.
            model: name of a served model.
            stop: texts of which the first one that the model writes ends the answer, and is not part of it.
            options: see GenerateOptions.
        """
        stops = self._checked(stop, options)
        ids = await self.render_chat(messages, model=model)
        return await self._whole(ids, model, stops, options)

    def stream_chat(
        self,
        messages: Messages,
        *,
        model: str,
        stop: str | Sequence[str] = (),
        **options: Unpack[GenerateOptions],
    ) -> AsyncGenerator[TextDelta, None]:
        """Answer a chat as `chat` does, piece by piece."""
        chat = chat_input(messages)
        ids = partial(self._render, chat, model)
        return self._stream(ids, model, self._checked(stop, options), options)

    async def complete(
        self,
        prompt: str | Sequence[int],
        *,
        model: str,
        stop: str | Sequence[str] = (),
        **options: Unpack[GenerateOptions],
    ) -> Answer:
        """Return the continuation of a text, or of token ids, up to `stop` as in `chat`. Text that spells a
        control token is that token."""
        stops = self._checked(stop, options)
        return await self._whole(await self._prompt(prompt, model), model, stops, options)

    def stream_complete(
        self,
        prompt: str | Sequence[int],
        *,
        model: str,
        stop: str | Sequence[str] = (),
        **options: Unpack[GenerateOptions],
    ) -> AsyncGenerator[TextDelta, None]:
        """Continue a text as `complete` does, piece by piece."""
        ids = partial(self._prompt, prompt, model)
        return self._stream(ids, model, self._checked(stop, options), options)

    async def embed(
        self, inputs: Sequence[str | Sequence[int]], *, model: str, dimensions: int | None = None
    ) -> list[list[float]]:
        """Return vectors of texts, or of token ids, in order. `dimensions`: the width, of a model that allows
        it."""
        room = asyncio.Semaphore(_WINDOW)

        async def one(document: str | Sequence[int]) -> list[float]:
            async with room:
                return await self._vector(await self._prompt(document, model), model, dimensions)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(document)) for document in inputs]
        except BaseExceptionGroup as failures:
            # The first; the others are alike, or follow from it.
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    def generate(
        self,
        token_ids: Sequence[int],
        *,
        model: str,
        request_id: str = "",
        **options: Unpack[GenerateOptions],
    ) -> AsyncGenerator[router_pb2.GenerateResponse, None]:
        """Generate token ids from token ids, one delta at a time; the last one has `end`.

        A failure after the first delta is not raised: it is an `end` with FINISH_REASON_ERROR.
        """
        check_options(options)
        spec = make_spec(token_ids, model, request_id, options)
        return self._generate(router_pb2.GenerateRequest(spec=spec))

    async def models(self) -> tuple[router_pb2.ServedModel, ...]:
        """Return the models that are served now."""
        connection, request = self._connection, router_pb2.ListModelsRequest()
        response = await connection.ask(
            lambda: connection.router.ListModels(request, timeout=connection.timeout_s)
        )
        return tuple(response.models)

    async def fleet(self) -> router_pb2.GetFleetResponse:
        """Return the attached engines and what the router counts on each."""
        connection, request = self._connection, router_pb2.GetFleetRequest()
        return await connection.ask(lambda: connection.router.GetFleet(request, timeout=connection.timeout_s))

    async def drain(self, engine: str, *, deadline_ms: int | None = None) -> tuple[str, ...]:
        """Let the engines of this name or instance id finish what they have and end.

        Returns:
            The instance ids of those that were told. They have left once `fleet` shows them no more.
        """
        connection = self._connection
        request = router_pb2.DrainRequest(engine=engine, deadline_ms=deadline_ms)
        answer = await connection.ask(lambda: connection.router.Drain(request, timeout=connection.timeout_s))
        return tuple(answer.draining)

    async def render_chat(
        self,
        messages: Messages,
        *,
        model: str,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        template_variables: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        """Return the token ids of a chat."""
        chat = chat_input(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_variables=template_variables,
        )
        return await self._render(chat, model)

    async def tokenize(
        self, text: str, *, model: str, add_special_tokens: bool | None = None
    ) -> tuple[int, ...]:
        """Return the token ids of plain text."""
        return await self._text.tokenize(
            tokenizer_pb2.TokenizeRequest(model=model, text=text, add_special_tokens=add_special_tokens)
        )

    async def detokenize(
        self, token_ids: Sequence[int], *, model: str, skip_special_tokens: bool | None = None
    ) -> str:
        """Return the text of token ids."""
        return await self._text.detokenize(
            tokenizer_pb2.DetokenizeRequest(
                model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens
            )
        )

    async def tokenizer_file(self, *, model: str = "") -> tuple[bytes, tokenizer_pb2.TokenizerDigest]:
        """Return the tokenizer.json of a model and its digest. Raises ValueError too: they do not match."""
        return await self._text.tokenizer_file(model)

    async def aclose(self) -> None:
        """Close the connections; calls that still run are cancelled."""
        await self._connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    @staticmethod
    def _checked(stop: str | Sequence[str], options: GenerateOptions) -> tuple[str, ...]:
        """Return the stop strings. Raises ValueError or TypeError for those, or for an option."""
        check_options(options)
        return stop_strings(stop)

    async def _render(self, chat: tokenizer_pb2.ChatInput, model: str) -> tuple[int, ...]:
        return await self._text.render(tokenizer_pb2.RenderRequest(model=model, chat=chat))

    async def _stream(
        self,
        prompt: Callable[[], Awaitable[Sequence[int]]],
        model: str,
        stops: Sequence[str],
        options: GenerateOptions,
    ) -> AsyncGenerator[TextDelta, None]:
        async with aclosing(self._deltas(await prompt(), model, stops, options)) as deltas:
            async for delta in deltas:
                yield delta

    async def _prompt(self, prompt: str | Sequence[int], model: str) -> Sequence[int]:
        return await self.tokenize(prompt, model=model) if isinstance(prompt, str) else prompt

    async def _whole(
        self, ids: Sequence[int], model: str, stops: Sequence[str], options: GenerateOptions
    ) -> Answer:
        texts: list[str] = []
        tokens: list[int] = []
        last: TextDelta | None = None
        async with aclosing(self._deltas(ids, model, stops, options)) as deltas:
            async for last in deltas:
                texts.append(last.text)
                tokens += last.token_ids
        if last is None or last.finish_reason is None or last.usage is None:
            raise RpcError(_CUT_SHORT)
        return Answer("".join(texts), tuple(tokens), last.finish_reason, last.usage)

    async def _deltas(
        self, ids: Sequence[int], model: str, stops: Sequence[str], options: GenerateOptions
    ) -> AsyncGenerator[TextDelta, None]:
        decoder = (await self._text.vocabulary(model)).detokenizer(ids)
        reader = TextReader(decoder, stops, options.get("min_tokens") or 0)
        request = router_pb2.GenerateRequest(spec=make_spec(ids, model, "", options))
        async with aclosing(self._generate(request)) as responses:
            async for response in responses:
                shown = list(response.token_ids)
                end = _good(response.end) if response.HasField("end") else None
                if end is not None and end.HasField("stop_token_id") and shown:
                    # It is counted and not shown, unless it came before its end.
                    shown.pop()
                before = reader.tokens
                text = reader.push(shown)
                if end is not None and not reader.stopped:
                    text += reader.finish()
                if reader.stopped:
                    # Leaving the iteration aborts the sequence.
                    counted = Usage(options.get("prompt_len") or len(ids), None, reader.tokens)
                    yield TextDelta(text, tuple(shown[: reader.tokens - before]), "stop", counted)
                    return
                if end is None:
                    yield TextDelta(text, tuple(shown))
                else:
                    reason, usage = _REASONS.get(end.reason), _usage(end.usage)
                    yield TextDelta(text, tuple(response.token_ids), reason, usage)

    async def _vector(self, ids: Sequence[int], model: str, dimensions: int | None) -> list[float]:
        pooling = common_pb2.Pooling(task=common_pb2.MODEL_TASK_EMBED, dimensions=dimensions)
        spec = common_pb2.SequenceSpec(model=model, token_ids=ids, pooling=pooling)
        async with aclosing(self._generate(router_pb2.GenerateRequest(spec=spec))) as responses:
            async for response in responses:
                if response.HasField("end"):
                    return [number for (number,) in struct.iter_unpack("<f", _good(response.end).vector)]
        raise RpcError(_CUT_SHORT)

    async def _generate(
        self, request: router_pb2.GenerateRequest
    ) -> AsyncGenerator[router_pb2.GenerateResponse, None]:
        tries, begun = self._connection.tries(), False
        while True:
            call = self._connection.router.Generate(request)
            try:
                async for response in call:
                    begun = True
                    yield response
                return
            except grpc.aio.AioRpcError as failure:
                error = self._connection.router_error(failure)
                if begun:
                    raise RpcError(error) from None
            finally:
                call.cancel()
            await tries.again(error)


_CUT_SHORT = common_pb2.Error(
    code=common_pb2.ERROR_CODE_UNAVAILABLE, message="The answer was cut short.", retryable=True
)


def _good(end: common_pb2.SequenceEnd) -> common_pb2.SequenceEnd:
    if end.reason not in _REASONS:
        raise RpcError(end.error if end.HasField("error") else _CUT_SHORT)
    return end


def _usage(usage: common_pb2.Usage) -> Usage:
    return Usage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
