"""Bodies of requests: what was said so far, and what is asked now."""

from __future__ import annotations

from typing import Any

import msgspec

from catenary_apps.load.conversations import Turn
from catenary_apps.load.sources import Prompt
from catenary_apps.load.target import Endpoint, Target

_encode = msgspec.json.Encoder().encode


class Session:
    """The requests of one conversation.

    A chat sends the messages so far, a completion the texts so far, questions and answers in turn.
    """

    def __init__(self, target: Target, model: str, *, strict_lengths: bool) -> None:
        self._target = target
        self._model = model
        self._strict = strict_lengths
        self._messages: list[dict[str, str]] = []
        self._said = ""

    def ask(self, turn: Turn) -> bytes:
        """The body of the request for a turn. Raises ValueError for what the route cannot take."""
        fields: dict[str, Any] = {"model": self._model}
        if self._target.endpoint is Endpoint.CHAT:
            if not isinstance(turn.prompt, str):
                raise ValueError("a chat takes text, not token ids")
            self._messages.append({"role": "user", "content": turn.prompt})
            fields["messages"] = self._messages
        else:
            fields["prompt"] = self._prompt(turn.prompt)
        if turn.output_tokens is not None:
            fields["max_tokens"] = turn.output_tokens
            if self._strict:
                fields |= {"min_tokens": turn.output_tokens, "ignore_eos": True}
        fields |= {"stream": True, "stream_options": {"include_usage": True}, **self._target.extra_body}
        return _encode({name: value for name, value in fields.items() if value is not None})

    def answered(self, text: str) -> None:
        """What the last answer said goes in front of the next question."""
        if self._target.endpoint is Endpoint.CHAT:
            self._messages.append({"role": "assistant", "content": text})
        else:
            self._said += text

    def _prompt(self, prompt: Prompt) -> Prompt:
        if not isinstance(prompt, str):
            if self._said:
                raise ValueError("further turns of a completion take text, not token ids")
            return prompt
        self._said += prompt
        return self._said
