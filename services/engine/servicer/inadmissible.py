"""Why a sequence is not admitted."""

from __future__ import annotations

from catenary.v1 import common_pb2


class Inadmissible(Exception):
    """The sequence is refused with `error`; the same one is refused again by an engine like this one."""

    def __init__(
        self,
        message: str,
        param: str | None = None,
        code: common_pb2.ErrorCode.ValueType = common_pb2.ERROR_CODE_INVALID_ARGUMENT,
    ) -> None:
        super().__init__(message)
        self.error = common_pb2.Error(code=code, message=message, param=param)
