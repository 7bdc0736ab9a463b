"""transformers on the real model in float32: what an engine's answers are compared with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, convert_slow_tokenizer

# Two scores nearer than this may change places with the order of a sum.
NEAR_TIE = 1e-4


@dataclass(frozen=True)
class Difference:
    """Where the reference goes on otherwise, and how near its two best scores are there."""

    position: int
    margin: float

    @property
    def near_tie(self) -> bool:
        """Whether the order of a sum may explain it."""
        return self.margin < NEAR_TIE


class Reference:
    """The model and its tokenizer, from a Hugging Face directory."""

    def __init__(self, directory: Path) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(directory)
        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self._model = model.eval()
        converter: Any = convert_slow_tokenizer
        alphabet = {char: byte for byte, char in converter.bytes_to_unicode().items()}
        added = self.tokenizer.get_added_vocab()
        self._ids = {
            token.encode() if token in added else bytes(alphabet[char] for char in token): token_id
            for token, token_id in self.tokenizer.get_vocab().items()
        }

    def chat(self, text: str) -> list[int]:
        """Prompt ids of a chat of one user message."""
        messages = [{"role": "user", "content": text}]
        ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        return list(ids)

    def text(self, token_ids: Sequence[int]) -> str:
        """Visible text of ids."""
        return str(
            self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )

    def ids(self, tokens: Iterable[bytes]) -> list[int]:
        """Ids of tokens given as the bytes that they stand for. Raises KeyError for what is no token."""
        return [self._ids[token] for token in tokens]

    def logits(self, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        """Scores [len(tokens), vocabulary] after the prompt and after each of the tokens but the last."""
        with torch.inference_mode():
            ids = torch.tensor([[*prompt, *tokens[:-1]]])
            scores: torch.Tensor = self._model(ids, logits_to_keep=len(tokens)).logits[0]
        return scores

    def greedy(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """Greedy decoding by `generate`, to an end-of-sequence token at the latest, which is included."""
        with torch.inference_mode():
            ids = torch.tensor([prompt])
            out = self._model.generate(ids, max_new_tokens=max_tokens, do_sample=False)
        return list(out[0, len(prompt) :].tolist())

    def difference(self, prompt: Sequence[int], tokens: Sequence[int]) -> Difference | None:
        """The first place where greedy decoding gives another token than `tokens`.

        Up to there its prefix is the same, so one forward over all tokens tells what step by step decoding
        would.
        """
        best = self.logits(prompt, tokens).topk(2, dim=-1)
        for position, token in enumerate(tokens):
            if int(best.indices[position, 0]) != token:
                return Difference(position, float(best.values[position, 0] - best.values[position, 1]))
        return None
