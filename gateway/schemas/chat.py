"""`POST /v1/chat/completions`."""

from __future__ import annotations

from pydantic import Field

from gateway.errors import bad_request
from gateway.schemas.base import INT32_MAX, GenerationFields
from gateway.schemas.limits import RequestLimits
from gateway.schemas.messages import Message


class ChatRequest(GenerationFields):
    """A chat to go on with."""

    messages: list[Message] = Field(min_length=1, description="The chat so far.")
    max_completion_tokens: int | None = Field(
        None,
        ge=1,
        le=INT32_MAX,
        description="Most tokens to generate; with max_tokens the smaller one counts.",
    )
    logprobs: bool | None = Field(None, description="Report the log probability of each token.")
    top_logprobs: int | None = Field(
        None, ge=0, le=20, description="With logprobs: report so many alternatives for each token."
    )

    @property
    def token_limit(self) -> int | None:
        limits = [limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None]
        return min(limits, default=None)

    @property
    def top_count(self) -> int | None:
        """Alternatives to report for each token; None if log probabilities were not asked for."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self, limits: RequestLimits) -> None:
        super().check(limits)
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("'top_logprobs' is only allowed when 'logprobs' is true.", "top_logprobs")
        if len(self.messages) > limits.max_messages:
            raise bad_request(f"Invalid 'messages': at most {limits.max_messages} are allowed.", "messages")
        for index, message in enumerate(self.messages):
            if len(message.texts) > limits.max_content_parts:
                raise bad_request(
                    f"Invalid 'messages.{index}.content': at most {limits.max_content_parts} parts.",
                    f"messages.{index}.content",
                )
