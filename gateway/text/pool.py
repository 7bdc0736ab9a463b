"""The tokenizer services, as one: prompts, token ids, constraints and tokenizer files from any of several."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from catenary.telemetry import get_logger
from catenary.text import TokenizerTraits, Vocabulary
from catenary.v1 import tokenizer_pb2
from gateway.caller import current_caller
from gateway.errors import internal
from gateway.text.calls import TokenizerCalls
from gateway.text.rendered import Rendered
from gateway.text.target import TokenizerTarget
from gateway.text.targets import Dial, TokenizerTargets

_log = get_logger(__name__)
# Ten times the largest file in use. It comes from a service of ours and is kept in memory.
MAX_TOKENIZER_BYTES = 256 << 20

T = TypeVar("T")


class TokenizerPool:
    """Renders prompts and fetches tokenizer files."""

    def __init__(
        self,
        targets: Sequence[str],
        dial: Dial,
        *,
        render_timeout_s: float,
        wait_s: float,
        silence_s: float,
        max_message_mib: int,
    ) -> None:
        """Nothing is dialled before `run`. Raises ValueError for a target that is no address.

        Args:
            targets: addresses of services; a name may stand for several.
            dial: makes a channel to (address, name).
            render_timeout_s: for an answer of a service.
            wait_s: how long a request waits while no service answers.
            silence_s: how long a service may leave questions unanswered before it counts as away.
            max_message_mib: of the channels that `dial` makes.
        """
        self._render_timeout_s = render_timeout_s
        self._services = TokenizerTargets(targets, dial, silence_s=silence_s, max_message_mib=max_message_mib)
        self._targets = self._services.all
        self._calls = TokenizerCalls(self._services, wait_s=wait_s)

    @property
    def answering(self) -> bool:
        """Whether any service answers."""
        return any(target.answering for target in self._targets)

    async def run(self) -> None:
        """Watch the services until cancelled."""
        await self._services.run()

    async def render(self, request: tokenizer_pb2.RenderRequest) -> Rendered:
        """The request's prompts, in order. Raises ApiError."""
        request.tenant = current_caller().owner

        async def call(target: TokenizerTarget) -> tokenizer_pb2.RenderResponse:
            return await target.render(request, self._render_timeout_s)

        response = await self._anywhere(call, request.model)
        sizes = {"completion": len(request.completion.prompts), "pairs": len(request.pairs.pairs)}
        expected = sizes.get(request.WhichOneof("input") or "", 1)
        if len(response.prompts) != expected:
            _log.error(
                "tokenizer sent another number of prompts", expected=expected, got=len(response.prompts)
            )
            raise internal()
        return Rendered(
            [list(prompt.token_ids) for prompt in response.prompts],
            [prompt.text_tail for prompt in response.prompts],
            [prompt.second_start for prompt in response.prompts],
        )

    async def tokenize(self, request: tokenizer_pb2.TokenizeRequest) -> list[int]:
        """Token ids of a text. Raises ApiError."""
        request.tenant = current_caller().owner

        async def call(target: TokenizerTarget) -> tokenizer_pb2.TokenizeResponse:
            return await target.unary(target.stub.Tokenize, request, self._render_timeout_s)

        return list((await self._anywhere(call, request.model)).token_ids)

    async def detokenize(self, request: tokenizer_pb2.DetokenizeRequest) -> str:
        """Text of ids. Raises ApiError."""
        request.tenant = current_caller().owner

        async def call(target: TokenizerTarget) -> tokenizer_pb2.DetokenizeResponse:
            return await target.unary(target.stub.Detokenize, request, self._render_timeout_s)

        return (await self._anywhere(call, request.model)).text

    async def check_constraint(self, request: tokenizer_pb2.CheckConstraintRequest) -> None:
        """Raises ApiError: 400 with the request's `param` if the constraint cannot be honoured."""
        request.tenant = current_caller().owner

        async def call(target: TokenizerTarget) -> tokenizer_pb2.CheckConstraintResponse:
            return await target.unary(target.stub.CheckConstraint, request, self._render_timeout_s)

        await self._anywhere(call, request.model)

    async def fetch(self, model: str) -> Vocabulary:
        """The model's tokenizer file. Raises ApiError if no service has it, ValueError if it is damaged."""

        async def call(target: TokenizerTarget) -> tuple[bytes, tokenizer_pb2.TokenizerDigest]:
            request = tokenizer_pb2.GetTokenizerRequest(model=model)
            data = bytearray()
            async for part in target.stub.GetTokenizer(request, timeout=self._render_timeout_s):
                data += part.chunk
                if len(data) > MAX_TOKENIZER_BYTES:
                    raise ValueError(f"tokenizer file is larger than {MAX_TOKENIZER_BYTES} bytes")
                if part.HasField("digest"):
                    return bytes(data), part.digest
            raise ValueError("tokenizer file was cut short")

        data, digest = await self._anywhere(call, model, waits=False)
        return await asyncio.to_thread(_load, data, digest)

    async def close(self) -> None:
        """Close all channels."""
        await self._services.close()

    async def _anywhere(
        self, call: Callable[[TokenizerTarget], Awaitable[T]], model: str, *, waits: bool = True
    ) -> T:
        """See TokenizerCalls."""
        return await self._calls.anywhere(call, model, waits=waits)


def _load(data: bytes, digest: tokenizer_pb2.TokenizerDigest) -> Vocabulary:
    if len(data) != digest.size or hashlib.sha256(data).hexdigest() != digest.sha256:
        raise ValueError("tokenizer file does not match its checksum")
    return Vocabulary(
        data,
        sha256=digest.sha256,
        special_ids=digest.special_token_ids,
        traits=TokenizerTraits.of(digest),
    )
