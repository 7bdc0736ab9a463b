"""The fixed errors of the servicer, and the statuses by which a router refuses it."""

from __future__ import annotations

import grpc

from catenary.v1 import common_pb2, engine_pb2

LINK_REFUSALS = frozenset(
    {
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)
"""A router that answers so does not want this engine as it is: to dial again at once is of no use."""

_RETRY_MS = 1000

_NOT_TAKING = {
    engine_pb2.ENGINE_STATE_DRAINING: (common_pb2.ERROR_CODE_DRAINING, "The engine is shutting down."),
    engine_pb2.ENGINE_STATE_STALLED: (common_pb2.ERROR_CODE_UNAVAILABLE, "The engine makes no progress."),
    engine_pb2.ENGINE_STATE_NOT_SERVING: (
        common_pb2.ERROR_CODE_UNAVAILABLE,
        "The engine's core is starting again.",
    ),
}
_STARTING = (common_pb2.ERROR_CODE_UNAVAILABLE, "The engine is starting.")


def duplicate() -> common_pb2.Error:
    """The handle was used before on this stream."""
    return common_pb2.Error(
        code=common_pb2.ERROR_CODE_DUPLICATE_REQUEST,
        message="The handle is in use or was used on this stream.",
    )


def not_taking(state: engine_pb2.EngineState.ValueType) -> common_pb2.Error:
    """The engine is in a state that takes nothing."""
    code, message = _NOT_TAKING.get(state, _STARTING)
    return common_pb2.Error(code=code, message=message, retryable=True, retry_after_ms=_RETRY_MS)


def full(limit: int) -> common_pb2.Error:
    """The engine holds `limit` sequences."""
    return _overloaded(f"The engine is full: it holds {limit} sequences (max_num_seqs plus max_waiting).")


def kept() -> common_pb2.Error:
    """Another router wants the engine for itself."""
    return _overloaded("The engine is kept for a sequence of another router.")


def not_alone() -> common_pb2.Error:
    """The sequence is to be computed alone, and the engine has others."""
    return _overloaded("The engine has other sequences.")


def engine_lost(message: str) -> common_pb2.Error:
    """A live sequence is lost with the engine's core."""
    return common_pb2.Error(code=common_pb2.ERROR_CODE_ENGINE_LOST, message=message, retryable=True)


def _overloaded(message: str) -> common_pb2.Error:
    return common_pb2.Error(
        code=common_pb2.ERROR_CODE_OVERLOADED, message=message, retryable=True, retry_after_ms=_RETRY_MS
    )
