"""A chat as a request states it, before a template sees it. These travel to the workers."""

from __future__ import annotations

import msgspec


class TurnCall(msgspec.Struct, frozen=True, array_like=True):
    """A call of an assistant's message. `arguments` is a JSON object as text; empty counts as one."""

    id: str
    name: str
    arguments: str


class ChatTurn(msgspec.Struct, frozen=True, array_like=True):
    """A message, its text parts joined. `content` None: it has none, which is not an empty one."""

    role: str
    content: str | None
    name: str | None = None
    tool_calls: tuple[TurnCall, ...] = ()
    tool_call_id: str | None = None
    reasoning: str | None = None


class ChatOptions(msgspec.Struct, frozen=True):
    """What a chat asks for besides its messages. Fields of JSON text are empty where there is nothing."""

    add_generation_prompt: bool = True
    # The prompt ends inside of the last message.
    continue_final_message: bool = False
    add_special_tokens: bool = False
    # A JSON array of function tools, one of documents, and an object of template variables.
    tools: str = ""
    documents: str = ""
    variables: str = ""
    # Name of one of the model's templates, or Jinja source where that is allowed.
    chat_template: str | None = None


class PromptLimits(msgspec.Struct, frozen=True):
    """Of each prompt: most tokens that fit, and how many of the last ones are kept of a longer one.

    `first_tokens`: only so many of the first ones matter, and those that the tokenizer puts behind a text.
    """

    max_tokens: int | None = None
    truncate_to: int | None = None
    first_tokens: int | None = None

    def kept(self, count: int) -> int:
        """Tokens that are left of `count`."""
        return count if self.truncate_to is None else min(count, self.truncate_to)
