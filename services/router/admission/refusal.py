"""The refusal of a request before it was accepted, free of any transport."""

from __future__ import annotations

from catenary.v1 import common_pb2


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
