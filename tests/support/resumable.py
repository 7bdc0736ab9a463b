"""What tests of resumed sequences say went wrong, and with what."""

from __future__ import annotations

from typing import Any

from catenary.resume import Failure, ResumePolicy
from catenary.v1 import common_pb2

LENGTH, STOP = common_pb2.FINISH_REASON_LENGTH, common_pb2.FINISH_REASON_STOP
POLICY = ResumePolicy()


def error(code: common_pb2.ErrorCode.ValueType, *, retryable: bool = True, **fields: Any) -> common_pb2.Error:
    """An error of this code."""
    return common_pb2.Error(code=code, message="No.", retryable=retryable, **fields)


LOST = error(common_pb2.ERROR_CODE_ENGINE_LOST)
DRAINING = error(common_pb2.ERROR_CODE_DRAINING)
AWAY = error(common_pb2.ERROR_CODE_UNAVAILABLE, retry_after_ms=300)
FULL = error(common_pb2.ERROR_CODE_OVERLOADED)


def failed(told: common_pb2.Error, **usage: int) -> Failure:
    """An end with this error."""
    end = common_pb2.SequenceEnd(
        reason=common_pb2.FINISH_REASON_ERROR, error=told, usage=common_pb2.Usage(**usage)
    )
    return Failure.of_end(end)


def spec(prompt: list[int], max_tokens: int | None = 20, **fields: Any) -> common_pb2.SequenceSpec:
    """A sequence with a seed."""
    return common_pb2.SequenceSpec(
        request_id="r",
        model="m",
        token_ids=prompt,
        sampling=common_pb2.SamplingParams(seed=3),
        stopping=common_pb2.StoppingParams(max_tokens=max_tokens, **fields.pop("stopping", {})),
        **fields,
    )
