"""Refusals of sequences that no engine would get in time, or ever."""

from __future__ import annotations

from catenary.v1 import common_pb2
from services.router.admission.lane import T, Ticket
from services.router.admission.refusal import Refused


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
