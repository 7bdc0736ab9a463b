"""Prompts as a tokenizer service rendered them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Rendered:
    """Token ids of each prompt, and the last characters of each: by these a parser knows what the answer to
    a chat begins in. Prompts that were no chat have an empty tail."""

    prompts: list[list[int]]
    text_tails: list[str]
    second_starts: list[int] = field(default_factory=list)
    """Of pairs: where the second text begins, 0 where that is not told."""

    @classmethod
    def of_ids(cls, prompts: list[list[int]]) -> Rendered:
        """Prompts that came as ids."""
        return cls(prompts, [""] * len(prompts))

    def truncated(self, keep: int) -> Rendered:
        """The last `keep` tokens of each prompt, at least 1."""
        return Rendered([prompt[-keep:] for prompt in self.prompts], self.text_tails)
