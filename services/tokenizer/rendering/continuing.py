"""A prompt that ends inside of its last message, as transformers' continue_final_message makes it.

The text that is gone on with is given to the template with a tag behind it, and the prompt is cut where the
tag came out.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any, Self

from services.tokenizer.rendering.errors import RenderRefused

PARAM = "continue_final_message"
_TAG_BYTES = 16


@dataclass(frozen=True, slots=True)
class Continuation:
    """`text`: what the last message says. `tag` cannot be guessed; its last character is a space."""

    text: str
    tag: str

    @classmethod
    def of(cls, messages: list[dict[str, Any]]) -> Self:
        """Of messages as a template gets them. Raises RenderRefused if the last one has no content."""
        content = messages[-1].get("content")
        text = content[-1]["text"] if isinstance(content, list) and content else content
        if not isinstance(text, str):
            raise RenderRefused("The last message has no content that could be gone on with.", param=PARAM)
        return cls(text, f"CONTINUE{secrets.token_hex(_TAG_BYTES)} ")

    def tagged(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages with the tag behind the last one's text."""
        *before, last = messages
        text = self.text + self.tag
        content = [{**last["content"][-1], "text": text}] if isinstance(last["content"], list) else text
        return [*before, {**last, "content": content}]

    def cut(self, prompt: str) -> str:
        """The rendered prompt up to where its last message is gone on with. Raises RenderRefused."""
        place = prompt.rfind(self.tag.strip())
        if place < 0 or self.text.strip() not in prompt:
            raise RenderRefused(
                "The model's chat template changes the last message, so that it cannot be gone on with.",
                param=PARAM,
            )
        # Without the space after it, the template strips contents: so is what is gone on with.
        kept = prompt.startswith(self.tag, place)
        return prompt[:place] if kept else prompt[:place].rstrip()
