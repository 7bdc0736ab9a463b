"""`POST /v1/batches`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gateway.errors import bad_request
from gateway.schemas.base import RequestModel, at_most
from gateway.schemas.limits import RequestLimits

# OpenAI's own, in its API reference; a week for the completion window.
MAX_FILE_ID = 128
MAX_HOURS = 168
_MAX_KEY = 64
_MAX_VALUE = 512
MIN_EXPIRY_S = 3600
MAX_EXPIRY_S = 2_592_000


class ExpiresAfter(RequestModel):
    """When result files are forgotten."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=MIN_EXPIRY_S, le=MAX_EXPIRY_S)


class BatchRequest(RequestModel):
    """A file of requests to run."""

    input_file_id: str = Field(min_length=1, max_length=MAX_FILE_ID, description="A file of purpose batch.")
    endpoint: str = Field(max_length=64, description="Where all of its requests go.")
    completion_window: str = Field(max_length=8, description="Hours in which it is to be done, as in 24h.")
    metadata: Annotated[dict[str, str] | None, at_most(16)] = Field(None, description="Kept with the batch.")
    output_expires_after: Annotated[ExpiresAfter | None, at_most(16)] = None

    @property
    def window_s(self) -> float:
        """The completion window in seconds."""
        return float(int(self.completion_window[:-1]) * 3600)

    def check(self, limits: RequestLimits) -> None:
        digits, unit = self.completion_window[:-1], self.completion_window[-1:]
        if unit != "h" or not (digits.isascii() and digits.isdecimal()) or not 0 < int(digits) <= MAX_HOURS:
            raise bad_request(
                f"Invalid 'completion_window': must be 1h to {MAX_HOURS}h, as in 24h.", "completion_window"
            )
        if any(
            len(key) > _MAX_KEY or len(value) > _MAX_VALUE for key, value in (self.metadata or {}).items()
        ):
            raise bad_request(
                f"Invalid 'metadata': keys must have at most {_MAX_KEY} characters and values at most "
                f"{_MAX_VALUE}.",
                "metadata",
            )
