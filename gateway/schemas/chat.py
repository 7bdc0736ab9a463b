"""`POST /v1/chat/completions`, and the part of a request that its chat template sees."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, FailFast, Field

from catenary.sequence_limits import MAX_TOP_LOGPROBS
from gateway.errors import ApiError, bad_request
from gateway.ignored import current_ignored
from gateway.schemas.base import (
    BOUNDED,
    INT32_MAX,
    MAX_FIELDS,
    MODEL,
    RequestLimits,
    RequestModel,
    at_most,
    within,
)
from gateway.schemas.generation import GenerationFields
from gateway.schemas.ignored import (
    CHAT,
    CHAT_EMBEDDING_FIELDS,
    CHAT_FIELDS,
    OTHERS_COUNTERPARTS,
    TOKENIZE,
    tree_of,
    unsupported_parameter,
)
from gateway.schemas.messages import Message, few_parts
from gateway.schemas.tools import ToolFields, ToolListFields

_EFFORT = "reasoning_effort"
# Variables with which templates switch thinking on and off.
_SWITCHES = ("enable_thinking", "thinking")
_READ_FOR_THINKING = frozenset({_EFFORT, *_SWITCHES})
# Characters of a variable that an error names.
MAX_SHOWN_NAME = 64


class Thinking(RequestModel):
    """Whether to think, as Anthropic, DeepSeek and GLM have it."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: int | None = Field(None, ge=0, le=INT32_MAX, description="Only where it has no effect.")


class ChatInputFields(ToolListFields):
    """Fields of every request that a chat template renders."""

    effort_param: ClassVar[str] = _EFFORT
    """What a client calls the effort."""

    messages: Annotated[list[Message], FailFast(), BeforeValidator(few_parts), within("max_messages")] = (
        Field(min_length=1, description="The chat so far.")
    )
    add_generation_prompt: bool | None = Field(
        None, description="Begin the assistant's turn. Default: true, without continue_final_message."
    )
    continue_final_message: bool | None = Field(None, description="Go on inside of the last message.")
    add_special_tokens: bool | None = Field(
        None,
        description="Add what the tokenizer puts around a text, as its BOS. Default: false.",
    )
    documents: Annotated[list[dict[str, Any]] | None, BOUNDED, within("max_documents")] = Field(
        None, description="Documents for the template."
    )
    chat_template: str | None = Field(
        None, min_length=1, description="Name of one of the model's templates, or a template if allowed."
    )
    chat_template_kwargs: Annotated[dict[str, Any] | None, BOUNDED, at_most(MAX_FIELDS)] = Field(
        None, description="Variables that the model's chat template reads."
    )
    thinking: Annotated[Thinking | None, at_most(MAX_FIELDS)] = Field(
        None, description="Whether to think first, if the model's chat template has a switch for it."
    )
    think: bool | None = Field(None, description="The same as thinking, as Ollama has it.")
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="How much to think first, if the model's chat template knows of it."
    )

    def check_chat_input(self) -> None:
        """Checks across these fields. Raises ApiError."""
        if self.continue_final_message and self.add_generation_prompt:
            raise bad_request(
                "'continue_final_message' is not allowed when 'add_generation_prompt' is true.",
                "continue_final_message",
            )
        thinks, param = self._thinking()
        if None not in (thinks, self.reasoning_effort) and thinks is (self.reasoning_effort == "none"):
            raise bad_request(f"'{param}' says something else than '{_EFFORT}'.", param)

    def _thinking(self) -> tuple[bool | None, str]:
        """Whether to think, if the request says so in other words than an effort, and the field that says it.

        Raises ApiError for two that contradict each other."""
        if self.thinking is None:
            return self.think, "think"
        thinks = self.thinking.type != "disabled"
        if self.think not in (None, thinks):
            raise bad_request("'think' says something else than 'thinking'.", "think")
        return thinks, "thinking"

    def template_variables(self, known: frozenset[str]) -> dict[str, Any]:
        """Variables for the template, without those that change nothing. Raises ApiError for one that is not
        among `known`, the model's.

        What a template of the request reads only the tokenizer service can say.
        """
        given = dict(self.chat_template_kwargs or {})
        if self.chat_template is None:
            for name in sorted(given.keys() - known):
                # A template without a switch thinks as the model does, with whatever value.
                if not current_ignored().lenient and (name not in _SWITCHES or known & _READ_FOR_THINKING):
                    raise _unread(name)
                current_ignored().note("chat_template_kwargs", name)
                del given[name]
        known |= given.keys()
        for param, wanted in (
            (self.effort_param, self._effort(known)),
            (self._thinking()[1], self._switched(known)),
        ):
            for name, value in wanted.items():
                if given.setdefault(name, value) != value:
                    raise bad_request(
                        f"'{param}' says something else than 'chat_template_kwargs.{name}'.", param
                    )
        return given

    def _effort(self, known: frozenset[str]) -> dict[str, Any]:
        """A template that knows no efforts may still know whether to think at all."""
        effort = self.reasoning_effort
        if effort is None:
            return {}
        if _EFFORT in known or self.chat_template is not None:
            return {_EFFORT: effort}
        if (switch := _switch(known)) is not None:
            return {switch: effort != "none"}
        if effort != "none":
            current_ignored().note(*self.effort_param.split("."))
        return {}

    def _switched(self, known: frozenset[str]) -> dict[str, Any]:
        """The variables that `thinking` or `think` asks for."""
        thinks, param = self._thinking()
        if thinks is None:
            return {}
        switch = _switch(known) if self.chat_template is None else _SWITCHES[0]
        if switch is None and _EFFORT not in known:
            if thinks:
                current_ignored().note(param)
            return {}
        if self.thinking is not None and self.thinking.budget_tokens is not None:
            raise unsupported_parameter("thinking.budget_tokens")
        if switch is not None:
            return {switch: thinks}
        # Whether it thinks at all is left to the effort, of which the template has a default.
        return {} if thinks else {_EFFORT: "none"}


def _switch(known: frozenset[str]) -> str | None:
    """The variable by which a template is told whether to think."""
    return next((name for name in _SWITCHES if name in known), None)


class TokenizeChatRequest(ChatInputFields):
    """`POST /tokenize` of a chat."""

    unsupported = TOKENIZE
    ignored = tree_of(CHAT_EMBEDDING_FIELDS)

    model: str = MODEL
    return_token_strs: bool | None = Field(None, description="Give the tokens' spellings too.")

    def check(self, limits: RequestLimits) -> None:
        self.check_chat_input()
        self.check_tools(limits)


def _unread(name: str) -> ApiError:
    shown = name.isascii() and name.isidentifier() and len(name) <= MAX_SHOWN_NAME
    return bad_request(
        "The model's chat template does not read this variable, or a request may not set it.",
        f"chat_template_kwargs.{name}" if shown else "chat_template_kwargs",
        "unknown_parameter",
    )


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
