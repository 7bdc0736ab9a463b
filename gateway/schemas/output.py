"""What an answer holds and how it is sent: the parameters of all generating routes."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from catenary.schema import MAX_TOP_LOGPROBS
from gateway.errors import bad_request
from gateway.ignored import current_ignored
from gateway.schemas.base import INT32_MAX, MAX_FIELDS, RequestModel, at_most
from gateway.schemas.limits import RequestLimits


class ObfuscationOptions(RequestModel):
    """What OpenAI's streams have on every route."""

    include_obfuscation: bool | None = Field(None, description="Accepted; events are not padded.")

    def check_asked(self, *, stream: bool) -> None:
        """Raises ApiError if something is asked of a stream that there is not to be."""
        if not stream and any(value for _, value in self):
            raise bad_request("'stream_options' is only allowed when 'stream' is true.", "stream_options")
        if self.include_obfuscation:
            current_ignored().note("stream_options", "include_obfuscation")


class StreamOptions(ObfuscationOptions):
    """What a stream reports besides text."""

    include_usage: bool | None = Field(None, description="Send one more chunk with the usage before [DONE].")
    continuous_usage_stats: bool | None = Field(
        None, description="With include_usage: send the request's usage so far with every chunk."
    )


class OutputFields(RequestModel):
    """Streaming, special tokens, token ids, log probabilities of the prompt."""

    stream: bool | None = Field(None, description="Send server-sent events.")
    stream_options: Annotated[StreamOptions | None, at_most(MAX_FIELDS)] = Field(
        None, description="Only with stream."
    )
    skip_special_tokens: bool | None = Field(None, description="Leave control tokens out of the text.")
    keep_special_tokens: bool | None = Field(None, description="The opposite of skip_special_tokens.")
    spaces_between_special_tokens: bool | None = Field(
        None, description="false: no spaces between control tokens that are shown."
    )
    prompt_logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_TOP_LOGPROBS,
        description="Report the log probability of each prompt token and of so many alternatives.",
    )
    return_token_ids: bool | None = Field(None, description="Report the ids of prompt and answer.")
    return_tokens_as_token_ids: bool | None = Field(
        None, description="Log probabilities name tokens as token_id:N."
    )
    truncate_prompt_tokens: int | None = Field(
        None,
        ge=-1,
        le=INT32_MAX,
        description="Keep the last so many tokens of a longer prompt; -1: as many as there is room for.",
    )

    @property
    def hides_special(self) -> bool:
        """Whether control tokens are left out of the text."""
        if self.skip_special_tokens is not None:
            return self.skip_special_tokens
        return not self.keep_special_tokens

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_running_usage(self) -> bool:
        """Whether every chunk has the usage so far."""
        return self.wants_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def check(self, limits: RequestLimits) -> None:
        if self.stream_options is not None:
            self.stream_options.check_asked(stream=bool(self.stream))
        if self.prompt_logprobs is not None and self.stream:
            raise bad_request("'prompt_logprobs' is not allowed when 'stream' is true.", "prompt_logprobs")
        if self.truncate_prompt_tokens == 0:
            raise bad_request(
                "Invalid 'truncate_prompt_tokens': must be at least 1, or -1.", "truncate_prompt_tokens"
            )
        both = (self.skip_special_tokens, self.keep_special_tokens)
        if None not in both and both[0] == both[1]:
            raise bad_request(
                "'keep_special_tokens' contradicts 'skip_special_tokens'.", "keep_special_tokens"
            )
        super().check(limits)
