"""What went wrong with a life of a sequence, and whether another one may go better."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from catenary.v1 import common_pb2

ROUTER_LOST = common_pb2.Error(
    code=common_pb2.ERROR_CODE_UNAVAILABLE,
    message="The connection to the router was lost. Please retry.",
    retryable=True,
)
ABORTED = common_pb2.Error(
    code=common_pb2.ERROR_CODE_UNAVAILABLE, message="The request was aborted by the server.", retryable=True
)
# What no other life could better.
GOOD_ENDS = (common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH)
NO_REASON = common_pb2.Error(
    code=common_pb2.ERROR_CODE_INTERNAL, message="The sequence failed without a reason."
)


class Cause(StrEnum):
    """Why a sequence is submitted again. A closed set: it labels metrics."""

    # Its engine died, was fenced, or stalled for too long.
    ENGINE_LOST = "engine_lost"
    # Its engine failed it, and perhaps a whole step with it.
    ENGINE_FAILED = "engine_failed"
    ROUTER_LOST = "router_lost"
    # What runs it is about to end, or takes nothing new.
    DRAINING = "draining"
    # Nobody serves the model at the moment.
    UNAVAILABLE = "unavailable"
    OVERLOADED = "overloaded"
    # Somebody other than its reader has aborted it.
    ABORTED = "aborted"


_CAUSES: dict[int, Cause] = {
    common_pb2.ERROR_CODE_ENGINE_LOST: Cause.ENGINE_LOST,
    common_pb2.ERROR_CODE_INTERNAL: Cause.ENGINE_FAILED,
    common_pb2.ERROR_CODE_DRAINING: Cause.DRAINING,
    common_pb2.ERROR_CODE_UNAVAILABLE: Cause.UNAVAILABLE,
    common_pb2.ERROR_CODE_OVERLOADED: Cause.OVERLOADED,
}


@dataclass(frozen=True, slots=True)
class Failure:
    """The end of a life. `cause` is None for what no repetition mends; `refused`: it was never accepted."""

    error: common_pb2.Error
    cause: Cause | None
    refused: bool = False
    usage: common_pb2.Usage | None = None

    @classmethod
    def of_end(cls, end: common_pb2.SequenceEnd) -> Failure:
        """An end with FINISH_REASON_ERROR, or with an ABORT that its reader did not ask for."""
        if end.reason == common_pb2.FINISH_REASON_ABORT:
            return cls(ABORTED, Cause.ABORTED, usage=end.usage)
        error = end.error if end.HasField("error") else NO_REASON
        return cls(error, _CAUSES.get(error.code) if error.retryable else None, usage=end.usage)

    @classmethod
    def of_refusal(cls, error: common_pb2.Error) -> Failure:
        """A refusal, of a submit that may be the first one or not."""
        cause = _CAUSES.get(error.code) if error.retryable else None
        if cause is Cause.ENGINE_FAILED:
            cause = None
        if error.code == common_pb2.ERROR_CODE_MODEL_NOT_FOUND:
            # A router that has just been started does not know yet what its engines serve.
            cause = Cause.UNAVAILABLE
        return cls(error, cause, refused=True)

    @classmethod
    def router_lost(cls) -> Failure:
        """The stream to the router broke, or the router is silent."""
        return cls(ROUTER_LOST, Cause.ROUTER_LOST)
