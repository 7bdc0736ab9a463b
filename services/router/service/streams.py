"""What the long-lived streams have in common."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

from catenary.rpc import refuse
from catenary.v1 import common_pb2, engine_pb2, router_pb2

INTERNAL = common_pb2.Error(
    code=common_pb2.ERROR_CODE_INTERNAL, message="The router failed because of an internal error."
)


M = TypeVar("M", router_pb2.SessionRequest, engine_pb2.AttachRequest)


class Cut:
    """Ends the handler that made it from outside, when it is stuck in a write and can be told nothing."""

    def __init__(self) -> None:
        self._task = asyncio.current_task()

    def now(self) -> None:
        """Cancel the call."""
        if self._task is not None:
            self._task.cancel()


async def first_message(requests: AsyncIterator[M], expected: str, *, timeout_s: float) -> M:
    """The first message of a stream, which must have the payload `expected`.

    Raises:
        RpcError: INVALID_ARGUMENT if it has another one, TIMEOUT if none comes.
    """
    try:
        async with asyncio.timeout(timeout_s):
            message = await anext(requests, None)
    except TimeoutError:
        raise refuse(
            common_pb2.ERROR_CODE_TIMEOUT, f"No {expected} came within {timeout_s:g} seconds."
        ) from None
    if message is None or message.WhichOneof("payload") != expected:
        raise refuse(
            common_pb2.ERROR_CODE_INVALID_ARGUMENT, f"The first message of a stream must be the {expected}."
        )
    return message
