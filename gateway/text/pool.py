"""The tokenizer services, as one: prompts, token ids, constraints and tokenizer files from any of several."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import grpc

from catenary.rpc import NamedAddresses, RpcError, error_of, resolve
from catenary.telemetry import get_logger
from catenary.text import TokenizerTraits, Vocabulary
from catenary.v1 import common_pb2, tokenizer_pb2
from gateway.errors import ApiError, from_wire, internal, timed_out, unavailable
from gateway.text.target import Rendered, TokenizerTarget

T = TypeVar("T")
_log = get_logger(__name__)


Dial = Callable[[str, str], grpc.aio.Channel]
_DNS = "dns:///"


class TokenizerTargets:
    """One target for each address. A name is looked up again and again; an address that it does not stand for
    any more is dropped once it does not answer."""

    def __init__(
        self,
        addresses: Sequence[str],
        dial: Dial,
        *,
        silence_s: float,
        max_message_mib: int,
        look_up: Callable[[str], Awaitable[Sequence[str]]] = resolve,
    ) -> None:
        """`dial(address, name)` makes a channel; `silence_s`, `max_message_mib`: see TokenizerTarget. A name
        may have `dns:///` in front of it. Raises ValueError for what is not an address."""
        self._addresses = NamedAddresses([address.removeprefix(_DNS) for address in addresses], look_up)
        self._dial = dial
        self._silence_s = silence_s
        self._max_message_mib = max_message_mib
        self._known: dict[str, TokenizerTarget] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._dropped: list[TokenizerTarget] = []
        self.on_change: Callable[[], None] = lambda: None
        """Called when one begins to answer, or does not."""
        self.all: list[TokenizerTarget] = []
        """Those that are known now, in an order that is the owner's to change."""
        for address in self._addresses.literal:
            self._add(address, address)

    async def run(self) -> None:
        """Watch them until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for address in list(self._known):
                self._watch(tasks, address)
            while self._addresses.names:
                await self._look_up(tasks)
                answering = any(target.answering for target in self.all)
                await asyncio.sleep(self._addresses.pause_s(connected=answering))

    async def close(self) -> None:
        """Close all channels, once `run` has ended."""
        for target in (*self._known.values(), *self._dropped):
            await target.close()

    async def _look_up(self, tasks: asyncio.TaskGroup) -> None:
        wanted = await self._addresses.wanted(
            {address: target.answering for address, target in self._known.items()}
        )
        for address, name in wanted.items():
            if address not in self._known:
                self._add(address, name)
                self._watch(tasks, address)
        for address, target in list(self._known.items()):
            if address not in wanted and not target.answering:
                await self._drop(address, target)
        await self._close_dropped()

    def _add(self, address: str, name: str) -> None:
        channel = self._dial(address, name)
        target = TokenizerTarget(
            address,
            channel,
            silence_s=self._silence_s,
            max_message_mib=self._max_message_mib,
            on_change=lambda: self.on_change(),
        )
        self._known[address] = target
        self.all.append(target)

    def _watch(self, tasks: asyncio.TaskGroup, address: str) -> None:
        watch = self._known[address].watch()
        self._watches[address] = tasks.create_task(watch, name=f"tokenizer {address}")

    async def _drop(self, address: str, target: TokenizerTarget) -> None:
        del self._known[address]
        self.all.remove(target)
        self._dropped.append(target)
        watch = self._watches.pop(address)
        watch.cancel()
        await asyncio.wait({watch})
        await target.drop()

    async def _close_dropped(self) -> None:
        for target in [target for target in self._dropped if not target.calls]:
            await target.close()
            self._dropped.remove(target)


TRIES = 3
"""Worker crashes after which a request is refused: one that crashes each worker must not reach them all. No
option: two crashes may be chance (a worker that was killed for memory), and each one more costs a worker."""
_AWAY = (common_pb2.ERROR_CODE_UNAVAILABLE, common_pb2.ERROR_CODE_DRAINING)


class TokenizerCalls:
    """Makes calls that have no effects, so that each may be made again.

    A call at a service that does not answer its health checks is given up and made at another one as soon as
    there is one that does; with none, it waits for one for `wait_s` seconds.
    """

    def __init__(self, services: TokenizerTargets, *, wait_s: float) -> None:
        self._services = services
        self._wait_s = wait_s
        self._news = asyncio.Event()
        services.on_change = self._changed

    async def anywhere(
        self, call: Callable[[TokenizerTarget], Awaitable[T]], model: str, *, waits: bool = True
    ) -> T:
        """What `call` gives at a service that has the model.

        Without `waits` all are asked, those too that have not answered yet, and none is waited for. Raises
        ApiError.
        """
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
                await self._wait_for_news(deadline)
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
                others = [one for one in self._services.all if one.has(model) and one not in strangers]
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
        """The least busy of those that answer, first of all one that did when it was asked last."""
        targets = self._services.all
        free = [
            one for one in targets if one.has(model) and one not in but and (one.answering or not answering)
        ]
        if not free:
            return None
        # The first of equals is the one that was not asked for longest.
        target = min(free, key=lambda one: (not one.prompt, one.calls))
        targets.remove(target)
        targets.append(target)
        return target

    async def _wait_for_news(self, deadline: float) -> None:
        """Return when a service answers again. Raises ApiError at the deadline, of the loop's clock."""
        try:
            async with asyncio.timeout_at(deadline):
                await self._news.wait()
        except TimeoutError:
            raise _away(self._wait_s) from None

    def _changed(self) -> None:
        """A service answers again, or does not."""
        # Those that wait now wake; those that come later wait for what comes later.
        self._news.set()
        self._news = asyncio.Event()
        targets = self._services.all
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
        # It names the limit that has passed: the service's own, or that of the call.
        return timed_out(error.message)
    return from_wire(error, model=model)


# Ten times the largest file in use. It comes from a service of ours and is kept in memory.
MAX_TOKENIZER_BYTES = 256 << 20


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

        async def call(target: TokenizerTarget) -> tokenizer_pb2.TokenizeResponse:
            return await target.unary(target.stub.Tokenize, request, self._render_timeout_s)

        return list((await self._anywhere(call, request.model)).token_ids)

    async def detokenize(self, request: tokenizer_pb2.DetokenizeRequest) -> str:
        """Text of ids. Raises ApiError."""

        async def call(target: TokenizerTarget) -> tokenizer_pb2.DetokenizeResponse:
            return await target.unary(target.stub.Detokenize, request, self._render_timeout_s)

        return (await self._anywhere(call, request.model)).text

    async def check_constraint(self, request: tokenizer_pb2.CheckConstraintRequest) -> None:
        """Raises ApiError: 400 with the request's `param` if the constraint cannot be honoured."""

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
