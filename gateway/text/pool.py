"""The tokenizer services: any of several, each call to the least busy, again elsewhere if one is away."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import grpc

from catenary.rpc import RpcError, error_of
from catenary.telemetry import get_logger
from catenary.text import TokenizerTraits, Vocabulary
from catenary.v1 import common_pb2, tokenizer_pb2
from gateway.errors import ApiError, from_wire, internal, timed_out, unavailable
from gateway.text.rendered import Rendered
from gateway.text.target import TokenizerTarget
from gateway.text.targets import Dial, TokenizerTargets

_log = get_logger(__name__)
MAX_TOKENIZER_BYTES = 256 << 20
TRIES = 3
_RETRY_PAUSE_S = 0.1
_AWAY = (common_pb2.ERROR_CODE_UNAVAILABLE, common_pb2.ERROR_CODE_DRAINING)

T = TypeVar("T")


class TokenizerPool:
    """Renders prompts and fetches tokenizer files."""

    def __init__(
        self,
        targets: Sequence[str],
        dial: Dial,
        *,
        render_timeout_s: float,
        silence_s: float,
        max_message_mib: int,
    ) -> None:
        """Nothing is dialled before `run`. Raises ValueError for a target that is no address.

        Args:
            targets: addresses of services; a name may stand for several.
            dial: makes a channel to (address, name).
            render_timeout_s: for an answer.
            silence_s: how long a service may leave questions unanswered before it counts as away.
            max_message_mib: of the channels that `dial` makes.
        """
        self._render_timeout_s = render_timeout_s
        self._services = TokenizerTargets(targets, dial, silence_s=silence_s, max_message_mib=max_message_mib)
        self._targets = self._services.all

    @property
    def answering(self) -> bool:
        """Whether any service answers."""
        return any(target.answering for target in self._targets)

    async def run(self) -> None:
        """Watch the services until cancelled."""
        await self._services.run()

    async def render(self, request: tokenizer_pb2.RenderRequest) -> Rendered:
        """The request's prompts, in order. Raises ApiError."""
        if not self._can_render(request.model):
            # Rather than wait for one that is frozen until the time is up.
            raise _away()

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
        if not self.answering:
            raise _away()

        async def call(target: TokenizerTarget) -> tokenizer_pb2.TokenizeResponse:
            return await target.stub.Tokenize(request, timeout=self._render_timeout_s)

        return list((await self._anywhere(call, request.model)).token_ids)

    async def detokenize(self, request: tokenizer_pb2.DetokenizeRequest) -> str:
        """Text of ids. Raises ApiError."""
        if not self.answering:
            raise _away()

        async def call(target: TokenizerTarget) -> tokenizer_pb2.DetokenizeResponse:
            return await target.stub.Detokenize(request, timeout=self._render_timeout_s)

        return (await self._anywhere(call, request.model)).text

    async def check_constraint(self, request: tokenizer_pb2.CheckConstraintRequest) -> None:
        """Raises ApiError: 400 with the request's `param` if the constraint cannot be honoured."""
        if not self.answering:
            raise _away()

        async def call(target: TokenizerTarget) -> tokenizer_pb2.CheckConstraintResponse:
            return await target.stub.CheckConstraint(request, timeout=self._render_timeout_s)

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

        data, digest = await self._anywhere(call, model)
        return await asyncio.to_thread(_load, data, digest)

    async def close(self) -> None:
        """Close all channels."""
        await self._services.close()

    def _can_render(self, model: str) -> bool:
        return any(target.answering and target.has(model) for target in self._targets)

    async def _anywhere(self, call: Callable[[TokenizerTarget], Awaitable[T]], model: str) -> T:
        """`call` on the least busy of the targets that have the model and answer; on others, in turn, if that
        one is away, or has another model after all.

        Calls may be repeated."""
        # The sort is stable: of targets that are alike, the one that was not asked for longest comes first.
        order = sorted(
            (target for target in self._targets if target.has(model)),
            key=lambda target: (not target.prompt, target.calls),
        )
        if not order:
            raise _away()
        self._targets.remove(order[0])
        self._targets.append(order[0])
        strangers: set[TokenizerTarget] = set()
        for attempt in range(max(TRIES, len(order))):
            target = order[attempt % len(order)]
            if target.dropped or target in strangers:
                continue
            target.calls += 1
            try:
                result = await call(target)
                target.heard()
                return result
            except (grpc.aio.AioRpcError, RpcError) as failure:
                error = failure.error if isinstance(failure, RpcError) else error_of(failure)
                if error.code == common_pb2.ERROR_CODE_MODEL_NOT_FOUND and len(strangers) + 1 < len(order):
                    strangers.add(target)
                elif error.code not in _AWAY:
                    raise self._api_error(error, model) from None
            finally:
                target.calls -= 1
            if (attempt + 1) % len(order) == 0:
                await asyncio.sleep(_RETRY_PAUSE_S)
        raise _away()

    def _api_error(self, error: common_pb2.Error, model: str) -> ApiError:
        if error.code == common_pb2.ERROR_CODE_TIMEOUT:
            return timed_out(f"The prompt was not rendered within {self._render_timeout_s:g} seconds.")
        return from_wire(error, model=model)


def _away() -> ApiError:
    return unavailable("No tokenizer service is reachable.", code="tokenizer_unavailable")


def _load(data: bytes, digest: tokenizer_pb2.TokenizerDigest) -> Vocabulary:
    if len(data) != digest.size or hashlib.sha256(data).hexdigest() != digest.sha256:
        raise ValueError("tokenizer file does not match its checksum")
    return Vocabulary(
        data,
        sha256=digest.sha256,
        special_ids=digest.special_token_ids,
        traits=TokenizerTraits.of(digest),
    )
