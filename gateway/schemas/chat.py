"""`POST /v1/chat/completions`."""

from __future__ import annotations

from pydantic import Field

from catenary.schema import MAX_TOP_LOGPROBS
from gateway.errors import bad_request
from gateway.schemas.base import INT32_MAX
from gateway.schemas.chat_input import ChatInputFields
from gateway.schemas.generation import GenerationFields
from gateway.schemas.ignored import CHAT_FIELDS, tree_of
from gateway.schemas.limits import RequestLimits
from gateway.schemas.tools import ToolFields
from gateway.schemas.unsupported import CHAT, OTHERS_COUNTERPARTS


class ChatRequest(GenerationFields, ToolFields, ChatInputFields):
    """A chat to go on with."""

    unsupported = CHAT
    ignored = tree_of(CHAT_FIELDS)
    other_names = {
        **OTHERS_COUNTERPARTS,
        "n_probs": "top_logprobs",
        "input": "messages",
        "instructions": "messages",
        "prompt": "messages",
        "max_output_tokens": "max_completion_tokens",
        "text": "response_format",
    }

    max_completion_tokens: int | None = Field(
        None,
        ge=1,
        le=INT32_MAX,
        description="Most tokens to generate; with max_tokens the smaller one counts.",
    )
    logprobs: bool | None = Field(None, description="Report the log probability of each token.")
    top_logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_TOP_LOGPROBS,
        description="With logprobs: report so many alternatives for each token.",
    )

    @property
    def token_limit(self) -> int | None:
        limits = [limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None]
        return min(limits, default=None)

    @property
    def top_count(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self, limits: RequestLimits) -> None:
        super().check(limits)
        self.check_chat_input()
        self.check_tools(limits)
        if self.top_logprobs and not self.logprobs:
            raise bad_request("'top_logprobs' is only allowed when 'logprobs' is true.", "top_logprobs")
