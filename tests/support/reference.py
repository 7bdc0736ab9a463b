"""transformers on the real model in float32: what an engine's answers are compared with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

# Two scores nearer than this may change places with the order of a sum.
NEAR_TIE = 1e-4
# Sequences of one forward: large enough to be quick, small enough for the memory of a laptop.
BATCH = 8

# A prompt, and the tokens that came after it.
Pair: TypeAlias = tuple[Sequence[int], Sequence[int]]


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
        self.model = model.eval()
        alphabet = {char: byte for byte, char in bytes_to_unicode().items()}
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

    def logits(self, pairs: Sequence[Pair]) -> list[torch.Tensor]:
        """For each prompt with its tokens: scores [len(tokens), vocabulary] after the prompt and after each
        of the tokens but the last. One forward; shorter rows are filled up on the right, which none sees.
        """
        rows = [[*prompt, *tokens[:-1]] for prompt, tokens in pairs]
        width = max(map(len, rows))
        with torch.inference_mode():
            ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
            states = self.model.model(ids).last_hidden_state
            return [
                self.model.lm_head(states[index, len(prompt) - 1 : len(prompt) - 1 + len(tokens)])
                for index, (prompt, tokens) in enumerate(pairs)
            ]

    def greedy(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """Greedy decoding by `generate`, to an end-of-sequence token at the latest, which is included."""
        with torch.inference_mode():
            ids = torch.tensor([prompt])
            out = self.model.generate(ids, max_new_tokens=max_tokens, do_sample=False)
        return list(out[0, len(prompt) :].tolist())

    def differences(self, pairs: Sequence[Pair]) -> list[Difference | None]:
        """For each prompt with its tokens: the first place where greedy decoding gives another token.

        Up to there its prefix is the same, so one forward over all tokens tells what step by step decoding
        would.
        """
        batches = [pairs[start : start + BATCH] for start in range(0, len(pairs), BATCH)]
        threads = torch.get_num_threads()
        # Batches side by side, a thread each: threads that wait for one another inside of a forward spin, and
        # on a busy machine that takes several times as long.
        torch.set_num_threads(1)
        try:
            with ThreadPoolExecutor(threads) as pool:
                return [found for batch in pool.map(self._compare, batches) for found in batch]
        finally:
            torch.set_num_threads(threads)

    def _compare(self, pairs: Sequence[Pair]) -> list[Difference | None]:
        found = zip(pairs, self.logits(pairs), strict=True)
        return [_difference(scores, tokens) for (_, tokens), scores in found]


def _difference(scores: torch.Tensor, tokens: Sequence[int]) -> Difference | None:
    best = scores.topk(2, dim=-1)
    wrong = (best.indices[:, 0] != torch.tensor(tokens)).nonzero()
    if not len(wrong):
        return None
    position = int(wrong[0, 0])
    first, second = best.values[position].tolist()
    return Difference(position, first - second)
