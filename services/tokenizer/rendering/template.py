"""A model's chat template, compiled once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import msgspec
from jinja2.exceptions import SecurityError, TemplateError

from services.tokenizer.rendering.environment import TemplateRefusal, sandbox
from services.tokenizer.rendering.errors import ModelFilesError, RenderRefused

MAX_TEMPLATE_MESSAGE = 500


class ChatTurn(msgspec.Struct, frozen=True, array_like=True):
    """A message as templates see it: the text parts are joined already."""

    role: str
    content: str
    name: str | None = None


class ContentStyle(Enum):
    """How a template reads a message's content."""

    TEXT = "text"
    PARTS = "parts"


class ChatTemplate:
    """Renders messages to the prompt text.

    `special_tokens` are the variables that the template may use (bos_token and so on). Raises ModelFilesError
    if the template is not valid or breaks the sandbox.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, max_chars: int) -> None:
        try:
            self._template = sandbox().from_string(source)
        except (TemplateError, RecursionError) as error:
            line = getattr(error, "lineno", None)
            where = f" (line {line})" if line else ""
            raise ModelFilesError(f"the chat template is not valid{where}: {_one_line(str(error))}") from None
        self._special_tokens = dict(special_tokens)
        self._max_chars = max_chars
        self._style = self._detect_style()

    def render(self, turns: Sequence[ChatTurn], *, add_generation_prompt: bool) -> str:
        """The prompt text. Raises RenderRefused: in the template's own words, if it has any."""
        try:
            return self._run([_message(turn, self._style) for turn in turns], add_generation_prompt)
        except RenderRefused:
            raise
        except TemplateRefusal as refusal:
            raise RenderRefused(_one_line(str(refusal)), param="messages") from None
        except Exception:
            # Anything a template does wrong (a missing key, a type, a sandbox rule) is about these messages,
            # and what the interpreter says about it is not for the caller.
            raise RenderRefused(
                "The model's chat template cannot render these messages.", param="messages"
            ) from None

    def _run(self, messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
        chunks: list[str] = []
        size = 0
        variables: dict[str, Any] = {**self._special_tokens, "tools": None, "documents": None}
        variables |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        for chunk in self._template.generate(variables):
            size += len(chunk)
            if size > self._max_chars:
                raise RenderRefused(
                    f"The rendered prompt is longer than {self._max_chars} characters.", param="messages"
                )
            chunks.append(chunk)
        return "".join(chunks)

    def _detect_style(self) -> ContentStyle:
        """Templates of multimodal models walk a list of parts, and would show nothing of a plain string."""
        probe = ChatTurn("user", "catenary probe")
        for style in ContentStyle:
            try:
                text = self._run([_message(probe, style)], True)
            except SecurityError as error:
                raise ModelFilesError(
                    f"the chat template breaks the sandbox: {_one_line(str(error))}"
                ) from None
            except Exception:
                # A template may demand a dialogue of a certain shape: what it says of real messages counts.
                continue
            # A template that expects text prints a list as Python does.
            if probe.content in text and "'type'" not in text:
                return style
        return ContentStyle.TEXT


def _message(turn: ChatTurn, style: ContentStyle) -> dict[str, Any]:
    parts = style is ContentStyle.PARTS
    message: dict[str, Any] = {"role": "system" if turn.role == "developer" else turn.role}
    message["content"] = [{"type": "text", "text": turn.content}] if parts else turn.content
    if turn.name is not None:
        message["name"] = turn.name
    return message


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_TEMPLATE_MESSAGE else line[: MAX_TEMPLATE_MESSAGE - 3] + "..."
