"""Tokenizer services as one: prompts, token ids, constraints and tokenizer files from any of them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from operator import attrgetter
from typing import Any, TypeVar

import grpc

from catenary.rpc import RpcError, error_of, resolve
from catenary.telemetry import get_logger
from catenary.text import TokenizerTraits, Vocabulary
from catenary.v1 import common_pb2, tokenizer_pb2
from gateway.errors import ApiError, from_wire, internal, timed_out, unavailable
from gateway.targets import Dial, LookUp, Targets
from gateway.text.target import Rendered, TokenizerTarget

T = TypeVar("T")
_log = get_logger(__name__)

_DNS = "dns:///"
# Ten times the largest file in use. It comes from a service of ours and is kept in memory.
MAX_TOKENIZER_BYTES = 256 << 20
TRIES = 3
"""Worker crashes after which a request is refused: one that crashes each worker must not reach them all. No
option: two crashes may be chance (a worker that was killed for memory), and each one more costs a worker."""
_AWAY = (common_pb2.ERROR_CODE_UNAVAILABLE, common_pb2.ERROR_CODE_DRAINING)


class TokenizerPool:
    """Calls to the tokenizer services. None has effects, so that each may be repeated.

    A call at a service that does not answer its health checks is abandoned, and repeated at another one as
    soon as one answers; with none, it waits for one for `wait_s` seconds. Methods raise ApiError."""

    def __init__(
        self,
        addresses: Sequence[str],
        dial: Dial,
        *,
        render_timeout_s: float,
        wait_s: float,
        silence_s: float,
        max_message_mib: int,
        look_up: LookUp = resolve,
    ) -> None:
        """Prepare the pool; nothing is dialled before `run`. Raise ValueError for an invalid address.

        Args:
            addresses: of services; a name may stand for several, and have `dns:///` in front of it.
            dial: makes a channel to (address, name).
            render_timeout_s: for an answer of a service.
            wait_s: how long a request waits while no service answers.
            silence_s: how long a service may leave checks unanswered before it counts as away.
            max_message_mib: of the channels that `dial` makes.
            look_up: returns the addresses of a name.
        """

        def target(address: str, name: str) -> TokenizerTarget:
            return TokenizerTarget(
                address,
                dial(address, name),
                silence_s=silence_s,
                max_message_mib=max_message_mib,
                on_change=self._changed,
            )

        self._render_timeout_s = render_timeout_s
        self._wait_s = wait_s
        self._change = asyncio.Event()
        names = [address.removeprefix(_DNS) for address in addresses]
        self.targets: Targets[TokenizerTarget] = Targets(names, target, attrgetter("answering"), look_up)
        """Services, the most recently asked one last."""
        self.run, self.close = self.targets.run, self.targets.close

    @property
    def answering(self) -> bool:
        return any(target.answering for target in self.targets.all)

    async def render(self, request: tokenizer_pb2.RenderRequest) -> Rendered:
        response = await self.anywhere(
            lambda target: target.render(request, self._render_timeout_s), request.model
        )
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
        return list((await self._unary("Tokenize", request)).token_ids)

    async def detokenize(self, request: tokenizer_pb2.DetokenizeRequest) -> str:
        text: str = (await self._unary("Detokenize", request)).text
        return text

    async def check_constraint(self, request: tokenizer_pb2.CheckConstraintRequest) -> None:
        """Raise ApiError 400, with the request's `param`, if the constraint cannot be honoured."""
        await self._unary("CheckConstraint", request)

    async def fetch(self, model: str) -> Vocabulary:
        """Return the model's tokenizer. Raise ApiError if no service has it, ValueError for a bad file."""

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

        data, digest = await self.anywhere(call, model, waits=False)
        return await asyncio.to_thread(_load, data, digest)

    async def anywhere(
        self, call: Callable[[TokenizerTarget], Awaitable[T]], model: str, *, waits: bool = True
    ) -> T:
        """Return the result of `call` at a service that has the model.

        Without `waits`, ask also services that have not answered yet, and wait for none."""
        loop = asyncio.get_running_loop()
        deadline: float | None = None
        tried: set[TokenizerTarget] = set()
        strangers: set[TokenizerTarget] = set()
        lost_workers = 0
        while True:
            target = self._choose(model, tried | strangers, answering=waits)
            if target is None:
                if not waits:
                    raise _away()
                deadline = loop.time() + self._wait_s if deadline is None else deadline
                await self._wait_for_change(deadline)
                tried.clear()
                continue
            tried.add(target)
            try:
                async with target.calling(model):
                    result = await call(target)
            except TimeoutError:
                # It stopped answering: try another service, or this one once it answers again.
                continue
            except (grpc.aio.AioRpcError, RpcError) as failure:
                error = failure.error if isinstance(failure, RpcError) else error_of(failure)
                others = [one for one in self.targets.all if one.has(model) and one not in strangers]
                if error.code == common_pb2.ERROR_CODE_MODEL_NOT_FOUND and len(others) > 1:
                    strangers.add(target)
                elif error.code not in _AWAY:
                    raise _api_error(error, model) from None
                else:
                    # The service itself says when to ask again; a connection that is lost does not.
                    lost_workers += error.HasField("retry_after_ms")
                    if lost_workers >= TRIES:
                        raise _away() from None
                    target.failed()
            else:
                target.heard()
                return result

    def _choose(self, model: str, but: set[TokenizerTarget], *, answering: bool) -> TokenizerTarget | None:
        """Choose the least busy service that answers, if possible one that answered its last question."""
        targets = self.targets.all
        free = [
            one for one in targets if one.has(model) and one not in but and (one.answering or not answering)
        ]
        if not free:
            return None
        # The first of equals is the one that was not asked for longest.
        target = min(free, key=lambda one: (not one.prompt, one.live))
        targets.remove(target)
        targets.append(target)
        return target

    async def _unary(self, method: str, request: Any) -> Any:
        return await self.anywhere(
            lambda target: target.unary(getattr(target.stub, method), request, self._render_timeout_s),
            request.model,
        )

    async def _wait_for_change(self, deadline: float) -> None:
        """Return when a service answers again. Raise ApiError at the deadline, of the loop's clock."""
        try:
            async with asyncio.timeout_at(deadline):
                await self._change.wait()
        except TimeoutError:
            raise _away(self._wait_s) from None

    def _changed(self) -> None:
        """Wake waiting calls and give up those at silent services, after one began or ceased to answer."""
        self._change.set()
        self._change = asyncio.Event()
        targets = self.targets.all
        for target in targets:
            if target.silent:
                target.give_up(lambda model: True)
            elif target.hesitates:
                target.give_up(lambda model: any(one.prompt and one.has(model) for one in targets))


def _away(waited_s: float = 0) -> ApiError:
    message = (
        f"No tokenizer service has answered for {waited_s:g} seconds (failover-wait-s)."
        if waited_s
        else "No tokenizer service is reachable."
    )
    return unavailable(message, code="tokenizer_unavailable")


def _api_error(error: common_pb2.Error, model: str) -> ApiError:
    if error.code == common_pb2.ERROR_CODE_TIMEOUT:
        # The error names the limit that has passed: the service's own, or that of the call.
        return timed_out(error.message)
    return from_wire(error, model=model)


def _load(data: bytes, digest: tokenizer_pb2.TokenizerDigest) -> Vocabulary:
    if len(data) != digest.size or hashlib.sha256(data).hexdigest() != digest.sha256:
        raise ValueError("tokenizer file does not match its checksum")
    return Vocabulary(
        data,
        sha256=digest.sha256,
        special_ids=digest.special_token_ids,
        traits=TokenizerTraits.of(digest),
    )
