"""One call at any of the tokenizer services: at the least busy, at another one if that is lost, later if all
are."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc

from catenary.rpc import RpcError, error_of
from catenary.v1 import common_pb2
from gateway.errors import ApiError, from_wire, timed_out, unavailable
from gateway.text.target import TokenizerTarget
from gateway.text.targets import TokenizerTargets

TRIES = 3
"""Worker crashes after which a request is refused: one that crashes each worker must not reach them all. No
option: two crashes may be chance (a worker that was killed for memory), and each one more costs a worker."""
_AWAY = (common_pb2.ERROR_CODE_UNAVAILABLE, common_pb2.ERROR_CODE_DRAINING)

T = TypeVar("T")


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
