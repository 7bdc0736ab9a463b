"""Calls whose end overtook their first write."""

from __future__ import annotations

import grpc


def overtaken(error: grpc.aio.AioRpcError) -> bool:
    """Whether the status is grpc.aio's own, and the server's is lost: dial again to hear that.

    A write that fails because the call has just ended sets INTERNAL before the server's status is read.
    """
    return error.code() is grpc.StatusCode.INTERNAL and "execute_batch" in (error.debug_error_string() or "")
