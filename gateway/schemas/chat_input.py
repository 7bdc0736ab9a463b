"""What of a request its chat template sees: the messages, and what may stand beside them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, FailFast, Field

from gateway.errors import ApiError, bad_request
from gateway.schemas.base import MAX_FIELDS, at_most, within
from gateway.schemas.data import BOUNDED
from gateway.schemas.limits import RequestLimits
from gateway.schemas.messages import Message, few_parts
from gateway.schemas.tools import ToolListFields
from gateway.schemas.unsupported import TOKENIZE

_EFFORT = "reasoning_effort"
# Variables with which templates switch thinking on and off.
_SWITCHES = ("enable_thinking", "thinking")
MAX_SHOWN_NAME = 64


class ChatInputFields(ToolListFields):
    """Fields of every request that a chat template renders."""

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

    def template_variables(self, known: frozenset[str]) -> dict[str, Any]:
        """Variables for the template. Raises ApiError for one that is not among `known`, the model's.

        What a template of the request reads only the tokenizer service can say.
        """
        given = dict(self.chat_template_kwargs or {})
        if self.chat_template is None:
            for name in given.keys() - known:
                raise _unread(name)
        if self.reasoning_effort is not None:
            for name, value in self._effort(known | given.keys()).items():
                if given.setdefault(name, value) != value:
                    raise bad_request(
                        f"'{_EFFORT}' says something else than 'chat_template_kwargs.{name}'.", _EFFORT
                    )
        return given

    def _effort(self, known: frozenset[str]) -> dict[str, Any]:
        """A template that knows no efforts may still know whether to think at all."""
        effort = self.reasoning_effort
        if _EFFORT in known or self.chat_template is not None:
            return {_EFFORT: effort}
        switch = next((name for name in _SWITCHES if name in known), None)
        if switch is not None:
            return {switch: effort != "none"}
        if effort == "none":
            return {}
        raise bad_request(
            f"Invalid '{_EFFORT}': the model's chat template knows no efforts; only 'none' is allowed.",
            _EFFORT,
            "unsupported_value",
        )


class TokenizeChatRequest(ChatInputFields):
    """`POST /tokenize` of a chat."""

    unsupported = TOKENIZE

    model: str | None = Field(None, min_length=1, description="Served model. Default: the only one.")
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
