"""Refusals of sequences, free of any transport: before they are accepted, or because no engine takes them."""

from __future__ import annotations

from catenary.v1 import common_pb2
from services.router.admission.lanes import T, Ticket


class Refused(Exception):
    """A request was not accepted.

    The message is the router's own fixed text, meant for the caller. The service layer turns it into a gRPC
    status (`Generate`) or a `Refusal` (`Session`).
    """

    def __init__(
        self,
        code: common_pb2.ErrorCode.ValueType,
        message: str,
        *,
        param: str | None = None,
        retryable: bool = False,
        retry_after_ms: int | None = None,
    ) -> None:
        super().__init__(message)
        self.error = common_pb2.Error(
            code=code, message=message, param=param, retryable=retryable, retry_after_ms=retry_after_ms
        )

    @classmethod
    def of(cls, error: common_pb2.Error) -> Refused:
        """The refusal that an engine made."""
        refusal = cls(error.code, error.message)
        refusal.error = error
        return refusal


def too_late(ticket: Ticket[T], retry_after_ms: int) -> Refused:
    """It waited as long as it may, or may not wait at all."""
    seconds = ticket.deadline - ticket.since
    return Refused(
        common_pb2.ERROR_CODE_TIMEOUT,
        f"No engine had room for the request within {seconds:g} seconds (lane-wait-s, or the request's own "
        "limit). Try again later.",
        retryable=True,
        retry_after_ms=retry_after_ms,
    )


def not_served(retry_after_ms: int | None = None) -> Refused:
    """Nothing serves the model."""
    return Refused(
        common_pb2.ERROR_CODE_UNAVAILABLE,
        "No engine serves the model at the moment.",
        retryable=True,
        retry_after_ms=retry_after_ms,
    )


def does_not_fit(tokens: int, largest: int) -> Refused:
    """No engine could ever hold its prompt and one token more."""
    return Refused(
        common_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED,
        f"The request needs room for {tokens} tokens; the KV of the model's largest engine has {largest}.",
        param="prompt",
    )


def too_long(tokens: int, longest: int) -> Refused:
    """No engine of the model takes so long a sequence."""
    return Refused(
        common_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED,
        f"The request has {tokens} tokens; the longest sequence of the model's engines has {longest}.",
        param="prompt",
    )
