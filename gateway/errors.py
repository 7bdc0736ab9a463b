"""API errors and their JSON envelope. Every error of every route is rendered here."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from catenary.nearest import nearest
from catenary.v1 import common_pb2

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
INTERNAL_MESSAGE = "The server had an error while processing your request."
DEFAULT_RETRY_AFTER_MS = 1000
_NO_MODEL = "model_not_found"
# How much of the served models' names a text for people has; GET /v1/models has all.
_LISTED = 8
_SHOWN = 100
_FEWEST_ALIKE = 3


class ErrorObject(msgspec.Struct):
    """An error: `param` is the field to blame, `code` is for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(msgspec.Struct):
    """Every answer other than success, and the data of an event that ends a stream early."""

    error: ErrorObject


class ApiError(Exception):
    """Answer other than success: status, and the four fields of OpenAI's error object.

    `message` is for callers: fixed texts, names of fields and limits; never a value that the caller sent in
    full, a path, an address or an exception's text."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID_REQUEST,
        code: str | None = None,
        param: str | None = None,
        retry_after_ms: int | None = None,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.code = code
        self.param = param
        self.retry_after_ms = retry_after_ms
        self.extra_headers = headers

    def body(self) -> bytes:
        return msgspec.json.encode(self.envelope())

    def envelope(self) -> ErrorEnvelope:
        return ErrorEnvelope(ErrorObject(self.message, self.kind, self.param, self.code))

    def headers(self) -> list[tuple[bytes, bytes]]:
        found = [("content-type", "application/json"), *self.extra_headers]
        if self.retry_after_ms is not None:
            found.append(("retry-after", str(max(1, math.ceil(self.retry_after_ms / 1000)))))
            found.append(("retry-after-ms", str(self.retry_after_ms)))
        return [(name.encode(), value.encode()) for name, value in found]


def bad_request(message: str, param: str | None = None, code: str | None = "invalid_value") -> ApiError:
    """Return 400: the request itself is wrong."""
    return ApiError(400, message, code=code, param=param)


def context_length_exceeded(limit: int, prompt: int, requested: int, param: str) -> ApiError:
    """Return 400: prompt and requested tokens exceed the model's context; the text has both numbers."""
    return bad_request(
        f"This model's maximum context length is {limit} tokens. However, you requested {prompt + requested} "
        f"tokens ({prompt} in the {param}, {requested} in the completion). Please reduce the length of the "
        f"{param} or the completion.",
        param,
        "context_length_exceeded",
    )


def model_not_found(name: str, served: Sequence[str] = ()) -> ApiError:
    """Return 404: no such model is served. `served`: the names that a request may use; the text has the
    nearest one and the first few, as `GET /v1/models` lists them."""
    text = f"The model '{_shown(name)}' does not exist."
    if meant := _meant(name, served):
        text += f" Did you mean '{_shown(meant)}'?"
    if served:
        more = len(served) - _LISTED
        listed = ", ".join(f"'{_shown(each)}'" for each in served[:_LISTED])
        text += f" Served models: {listed}" + (f" and {more} more." if more > 0 else ".")
    return ApiError(404, text, code=_NO_MODEL, param="model")


def _meant(name: str, served: Sequence[str]) -> str | None:
    """Return the served model that is probably meant. People leave out a model's organisation, its size or
    its kind: `smollm2` is meant for `org/SmolLM2-135M-Instruct`."""
    if close := nearest(name, served):
        return close
    folded = name.casefold()
    holding = [each for each in served if folded in each.casefold() or each.casefold() in folded]
    return min(holding, key=len) if len(name) >= _FEWEST_ALIKE and holding else None


def _shown(name: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in name[:_SHOWN])


def unavailable(
    message: str, *, code: str = "engine_unavailable", retry_after_ms: int | None = None
) -> ApiError:
    """Return 503: nothing can serve the request now."""
    after = DEFAULT_RETRY_AFTER_MS if retry_after_ms is None else retry_after_ms
    return ApiError(503, message, kind=SERVER_ERROR, code=code, retry_after_ms=after)


def overloaded(
    message: str, *, retry_after_ms: int | None = None, code: str = "rate_limit_exceeded"
) -> ApiError:
    """Return 429: queues are full."""
    after = DEFAULT_RETRY_AFTER_MS if retry_after_ms is None else retry_after_ms
    return ApiError(429, message, kind="rate_limit_error", code=code, retry_after_ms=after)


def timed_out(message: str, *, status: int = 504, retry_after_ms: int | None = None) -> ApiError:
    """Return 504: a limit of the server passed (408: while waiting for the client or for a place)."""
    after = DEFAULT_RETRY_AFTER_MS if retry_after_ms is None else retry_after_ms
    return ApiError(status, message, kind=SERVER_ERROR, code="timeout", retry_after_ms=after)


def internal() -> ApiError:
    """Return 500 with the fixed text."""
    return ApiError(500, INTERNAL_MESSAGE, kind=SERVER_ERROR, code="internal_error")


_CLIENT_FAULTS: dict[int, str] = {
    common_pb2.ERROR_CODE_INVALID_ARGUMENT: "invalid_value",
    common_pb2.ERROR_CODE_UNSUPPORTED: "unsupported_value",
    common_pb2.ERROR_CODE_CONTEXT_LENGTH_EXCEEDED: "context_length_exceeded",
    common_pb2.ERROR_CODE_POISONED: "request_poisoned",
}
_AWAY: frozenset[int] = frozenset(
    {
        common_pb2.ERROR_CODE_DRAINING,
        common_pb2.ERROR_CODE_UNAVAILABLE,
        common_pb2.ERROR_CODE_ENGINE_LOST,
        common_pb2.ERROR_CODE_SCHEMA_MISMATCH,
        common_pb2.ERROR_CODE_CANCELLED,
    }
)


def from_wire(error: common_pb2.Error, *, model: str = "") -> ApiError:
    """Return the HTTP form of a peer's refusal or failure."""
    param = error.param if error.HasField("param") else None
    after = error.retry_after_ms if error.HasField("retry_after_ms") else None
    code = error.code
    if code in _CLIENT_FAULTS:
        return bad_request(error.message, param, _CLIENT_FAULTS[code])
    if code == common_pb2.ERROR_CODE_MODEL_NOT_FOUND:
        return (
            model_not_found(model) if model else ApiError(404, error.message, code=_NO_MODEL, param="model")
        )
    if code == common_pb2.ERROR_CODE_OVERLOADED:
        return overloaded(error.message, retry_after_ms=after)
    if code in _AWAY:
        return unavailable(error.message, retry_after_ms=after)
    if code in (common_pb2.ERROR_CODE_TIMEOUT, common_pb2.ERROR_CODE_SLOW_READER):
        return timed_out(error.message, status=408, retry_after_ms=after)
    return internal()
