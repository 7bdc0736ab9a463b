"""A client of Catenary's gRPC side: token ids in, token ids out, and text through the tokenizer service."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from types import TracebackType
from typing import Self, TypeVar

import grpc

from catenary.rpc import RpcError, TlsFiles, error_of, open_channel
from catenary.v1 import common_pb2, router_pb2, router_pb2_grpc, tokenizer_pb2, tokenizer_pb2_grpc

MAX_TOKENIZER_BYTES = 256 << 20

T = TypeVar("T")


class CatenaryClient:
    """Talks to a router and, if given one, to a tokenizer service. Made and used inside of one event loop.

    Args:
        target: the router's address, `host:port` or `unix:/path`.
        secret: the client role's secret.
        tls: files for TLS.
        tokenizer: the tokenizer service's address, for the methods that take or give text.
        timeout_s: limit of each call but `generate`, in seconds.

    Every method raises `RpcError`, whose `error` says what was refused and whether to try again.
    """

    def __init__(
        self,
        target: str,
        *,
        secret: str | None = None,
        tls: TlsFiles | None = None,
        tokenizer: str | None = None,
        timeout_s: float = 30,
    ) -> None:
        self._channels = [open_channel(target, secret=secret, tls=tls)]
        self._router = router_pb2_grpc.RouterServiceStub(self._channels[0])
        self._text: tokenizer_pb2_grpc.TokenizerServiceAsyncStub | None = None
        if tokenizer is not None:
            channel = open_channel(tokenizer, secret=secret, tls=tls)
            self._channels.append(channel)
            self._text = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        self._timeout_s = timeout_s

    async def generate(
        self,
        token_ids: Sequence[int],
        *,
        model: str,
        prompt_len: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        keep_top_k_duplicates: bool | None = None,
        min_p: float | None = None,
        presence_penalty: float | None = None,
        frequency_penalty: float | None = None,
        repetition_penalty: float | None = None,
        logit_bias: Mapping[int, float] | None = None,
        bad_words: Sequence[Sequence[int]] = (),
        allowed_token_ids: Sequence[int] = (),
        seed: int | None = None,
        max_tokens: int | None = None,
        min_tokens: int | None = None,
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool | None = None,
        top_logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        priority: int | None = None,
        cache_salt: str | None = None,
        constraint: common_pb2.Constraint | None = None,
        request_id: str = "",
    ) -> AsyncIterator[router_pb2.GenerateResponse]:
        """Generate, one delta at a time; the last one has `end`. What is None takes the model's own default.

        The fields are those of SequenceSpec in protos/catenary/v1/common.proto, which says what they mean.

        Leaving the iteration aborts the sequence. A failure after the first delta is not raised: it is
        an `end` with FINISH_REASON_ERROR.
        """
        spec = common_pb2.SequenceSpec(
            request_id=request_id,
            model=model,
            token_ids=token_ids,
            prompt_len=prompt_len,
            sampling=common_pb2.SamplingParams(
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                keep_top_k_duplicates=keep_top_k_duplicates,
                min_p=min_p,
                presence_penalty=presence_penalty,
                frequency_penalty=frequency_penalty,
                repetition_penalty=repetition_penalty,
                logit_bias=[
                    common_pb2.LogitBias(token_id=token, bias=bias)
                    for token, bias in (logit_bias or {}).items()
                ],
                bad_words=[common_pb2.TokenSequence(token_ids=word) for word in bad_words],
                allowed_token_ids=allowed_token_ids,
                seed=seed,
            ),
            stopping=common_pb2.StoppingParams(
                max_tokens=max_tokens,
                min_tokens=min_tokens,
                stop_token_ids=stop_token_ids,
                ignore_eos=ignore_eos,
            ),
            response=common_pb2.ResponseOptions(top_logprobs=top_logprobs, prompt_logprobs=prompt_logprobs),
            priority=priority,
            cache_salt=cache_salt,
            constraint=constraint,
        )
        call = self._router.Generate(router_pb2.GenerateRequest(spec=spec))
        try:
            async for delta in call:
                yield delta
        except grpc.aio.AioRpcError as error:
            raise RpcError(error_of(error)) from error
        finally:
            call.cancel()

    async def models(self) -> tuple[router_pb2.ServedModel, ...]:
        """The models that are served now."""
        response = await _answer(
            self._router.ListModels(router_pb2.ListModelsRequest(), timeout=self._timeout_s)
        )
        return tuple(response.models)

    async def fleet(self) -> router_pb2.GetFleetResponse:
        """The attached engines and what the router counts on each."""
        return await _answer(self._router.GetFleet(router_pb2.GetFleetRequest(), timeout=self._timeout_s))

    async def render_chat(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        model: str,
        add_generation_prompt: bool | None = None,
    ) -> tuple[int, ...]:
        """Token ids of a chat, from messages with `role` and `content`."""
        chat = tokenizer_pb2.ChatInput(
            messages=[
                tokenizer_pb2.ChatMessage(
                    role=message["role"], content=[tokenizer_pb2.ContentPart(text=message["content"])]
                )
                for message in messages
            ],
            add_generation_prompt=add_generation_prompt,
        )
        request = tokenizer_pb2.RenderRequest(model=model, chat=chat)
        response = await _answer(self._tokenizer().Render(request, timeout=self._timeout_s))
        return tuple(response.prompts[0].token_ids)

    async def tokenize(
        self, text: str, *, model: str, add_special_tokens: bool | None = None
    ) -> tuple[int, ...]:
        """Token ids of plain text."""
        request = tokenizer_pb2.TokenizeRequest(model=model, text=text, add_special_tokens=add_special_tokens)
        response = await _answer(self._tokenizer().Tokenize(request, timeout=self._timeout_s))
        return tuple(response.token_ids)

    async def detokenize(
        self, token_ids: Sequence[int], *, model: str, skip_special_tokens: bool | None = None
    ) -> str:
        """Text of token ids."""
        request = tokenizer_pb2.DetokenizeRequest(
            model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens
        )
        return (await _answer(self._tokenizer().Detokenize(request, timeout=self._timeout_s))).text

    async def tokenizer_file(self, *, model: str = "") -> tuple[bytes, tokenizer_pb2.TokenizerDigest]:
        """The tokenizer.json of a model and its digest. Raises ValueError if they do not match."""
        data = bytearray()
        digest: tokenizer_pb2.TokenizerDigest | None = None
        call = self._tokenizer().GetTokenizer(
            tokenizer_pb2.GetTokenizerRequest(model=model), timeout=self._timeout_s
        )
        try:
            async for part in call:
                data += part.chunk
                if len(data) > MAX_TOKENIZER_BYTES:
                    raise ValueError(f"the tokenizer file is larger than {MAX_TOKENIZER_BYTES} bytes")
                if part.HasField("digest"):
                    digest = part.digest
        except grpc.aio.AioRpcError as error:
            raise RpcError(error_of(error)) from error
        finally:
            call.cancel()
        if digest is None or digest.sha256 != hashlib.sha256(data).hexdigest():
            raise ValueError("the tokenizer file does not match its checksum")
        return bytes(data), digest

    async def aclose(self) -> None:
        """Close the connections; calls that still run are cancelled."""
        for channel in self._channels:
            await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        await self.aclose()

    def _tokenizer(self) -> tokenizer_pb2_grpc.TokenizerServiceAsyncStub:
        if self._text is None:
            raise ValueError("this client was made without a tokenizer address")
        return self._text


async def _answer(call: Awaitable[T]) -> T:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise RpcError(error_of(error)) from error
