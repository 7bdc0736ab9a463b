"""Refusals on their way over gRPC: an `Error` message, a status code, and back again."""

from __future__ import annotations

import grpc
from google.protobuf.message import DecodeError

from catenary.v1 import common_pb2
from catenary.v1.common_pb2 import ErrorCode

ERROR_TRAILER = "catenary-error-bin"
INTERNAL_TEXT = "The service failed to answer because of an internal error."
# Characters of an error's text: it travels in a trailer, which gRPC limits to 8 KiB.
MAX_TEXT = 1000

_STATUS: dict[ErrorCode.ValueType, grpc.StatusCode] = {
    common_pb2.ERROR_CODE_INVALID_ARGUMENT: grpc.StatusCode.INVALID_ARGUMENT,
    common_pb2.ERROR_CODE_UNSUPPORTED: grpc.StatusCode.INVALID_ARGUMENT,
    common_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED: grpc.StatusCode.INVALID_ARGUMENT,
    common_pb2.ERROR_CODE_MODEL_NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    common_pb2.ERROR_CODE_OVERLOADED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    common_pb2.ERROR_CODE_DRAINING: grpc.StatusCode.UNAVAILABLE,
    common_pb2.ERROR_CODE_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    common_pb2.ERROR_CODE_ENGINE_LOST: grpc.StatusCode.UNAVAILABLE,
    common_pb2.ERROR_CODE_CANCELLED: grpc.StatusCode.CANCELLED,
    common_pb2.ERROR_CODE_TIMEOUT: grpc.StatusCode.DEADLINE_EXCEEDED,
    common_pb2.ERROR_CODE_SLOW_READER: grpc.StatusCode.ABORTED,
    common_pb2.ERROR_CODE_DUPLICATE_REQUEST: grpc.StatusCode.ALREADY_EXISTS,
    common_pb2.ERROR_CODE_SCHEMA_MISMATCH: grpc.StatusCode.FAILED_PRECONDITION,
    common_pb2.ERROR_CODE_POISONED: grpc.StatusCode.INVALID_ARGUMENT,
}

# What a status without a trailer means. Texts are fixed: those of the transport name addresses.
_MEANING: dict[grpc.StatusCode, tuple[ErrorCode.ValueType, str, bool]] = {
    grpc.StatusCode.INVALID_ARGUMENT: (
        common_pb2.ERROR_CODE_INVALID_ARGUMENT,
        "The service refused the request's contents.",
        False,
    ),
    grpc.StatusCode.NOT_FOUND: (
        common_pb2.ERROR_CODE_INVALID_ARGUMENT,
        "The service does not know what was asked for.",
        False,
    ),
    grpc.StatusCode.UNIMPLEMENTED: (
        common_pb2.ERROR_CODE_UNSUPPORTED,
        "The service does not offer this operation.",
        False,
    ),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (
        common_pb2.ERROR_CODE_OVERLOADED,
        "The service is overloaded.",
        True,
    ),
    grpc.StatusCode.UNAVAILABLE: (common_pb2.ERROR_CODE_UNAVAILABLE, "The service cannot be reached.", True),
    grpc.StatusCode.DEADLINE_EXCEEDED: (
        common_pb2.ERROR_CODE_TIMEOUT,
        "The service did not answer in time.",
        True,
    ),
    grpc.StatusCode.CANCELLED: (common_pb2.ERROR_CODE_CANCELLED, "The call was cancelled.", False),
    grpc.StatusCode.ALREADY_EXISTS: (
        common_pb2.ERROR_CODE_DUPLICATE_REQUEST,
        "The request's id is in use.",
        False,
    ),
    grpc.StatusCode.FAILED_PRECONDITION: (
        common_pb2.ERROR_CODE_SCHEMA_MISMATCH,
        "The service speaks another revision of the protocol.",
        False,
    ),
    grpc.StatusCode.UNAUTHENTICATED: (
        common_pb2.ERROR_CODE_INTERNAL,
        "The service refused the caller's secret.",
        False,
    ),
    grpc.StatusCode.PERMISSION_DENIED: (
        common_pb2.ERROR_CODE_INTERNAL,
        "The caller's secret is not for this operation.",
        False,
    ),
}

_TOO_LARGE = ("Received message larger than max", "Sent message larger than max")


class RpcError(Exception):
    """A refusal. Raised in a handler it becomes the call's status, and itself the trailing metadata."""

    def __init__(self, error: common_pb2.Error) -> None:
        super().__init__(error.message)
        self.error = error

    @property
    def status(self) -> grpc.StatusCode:
        """The gRPC status that carries the error."""
        return status_of(self.error.code)


def status_of(code: ErrorCode.ValueType) -> grpc.StatusCode:
    """Return the gRPC status of an error code; INTERNAL for a code that is not in the contract."""
    return _STATUS.get(code, grpc.StatusCode.INTERNAL)


def refuse(
    code: ErrorCode.ValueType,
    message: str,
    *,
    param: str | None = None,
    retryable: bool = False,
    retry_after_ms: int | None = None,
) -> RpcError:
    """Return the refusal to raise: `raise refuse(ERROR_CODE_OVERLOADED, "...", retryable=True,
    retry_after_ms=500)`.

    The text is for the caller; it is cut at 1000 characters because trailing metadata is limited.
    """
    return RpcError(
        common_pb2.Error(
            code=code,
            message=message[:MAX_TEXT],
            param=None if param is None else param[:MAX_TEXT],
            retryable=retryable,
            retry_after_ms=retry_after_ms,
        )
    )


def error_of(exc: grpc.aio.AioRpcError, *, at: str = "") -> common_pb2.Error:
    """Return the error of a failed call, or one with a fixed text made from its status.

    `at`: the address that was called, for texts of ours, where the caller may know it.
    """
    trailer = (exc.trailing_metadata() or grpc.aio.Metadata()).get(ERROR_TRAILER)
    if isinstance(trailer, bytes):
        try:
            return common_pb2.Error.FromString(trailer)
        except DecodeError:
            pass
    details = exc.details() or ""
    if exc.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and any(text in details for text in _TOO_LARGE):
        return common_pb2.Error(
            code=common_pb2.ERROR_CODE_INVALID_ARGUMENT,
            message="The request is larger than the service's message limit (max_message_mib).",
        )
    code, message, retryable = _MEANING.get(
        exc.code(), (common_pb2.ERROR_CODE_INTERNAL, INTERNAL_TEXT, False)
    )
    if at:
        message = message.replace("The service", f"The service at {at}", 1)
    return common_pb2.Error(code=code, message=message, retryable=retryable)
