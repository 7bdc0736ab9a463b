"""Rows with random sampling parameters, and logits for them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from services.engine.sampling import RowParams, TokenMasks
from tests.support.sampling import row

VOCAB = 700
LAST_TOKENS = [17, 4, 30]


def random_row(rng: random.Random) -> RowParams:
    """Any mixture of parameters."""
    tokens = [rng.randrange(60) for _ in range(rng.randint(1, 40))]
    options: dict[str, Any] = {"seed": rng.randrange(1000)}

    def perhaps(share: float, **some: Any) -> None:
        if rng.random() < share:
            options.update(some)

    perhaps(0.3, temperature=0.0)
    perhaps(0.3, temperature=rng.choice([0.01, 0.7, 5.0]))
    perhaps(0.4, top_p=rng.choice([0.0001, 0.5, 0.95, 0.9999]))
    perhaps(0.4, top_k=rng.choice([1, 5, 255, 256, 300, 699, 700, 10_000]))
    perhaps(0.3, keep_top_k_duplicates=False)
    perhaps(0.3, min_p=rng.choice([0.001, 0.2, 1.0]))
    perhaps(0.3, repetition_penalty=rng.choice([0.5, 1.4]))
    perhaps(0.3, frequency_penalty=rng.choice([-0.5, 1.5]))
    perhaps(0.3, presence_penalty=rng.choice([-2.0, 0.7]))
    perhaps(0.3, logit_bias=tuple((token, rng.uniform(-9, 9)) for token in rng.sample(range(60), 9)))
    perhaps(0.4, top_logprobs=rng.choice([0, 3, 20]))
    perhaps(0.2, allowed_token_ids=tuple(rng.sample(range(VOCAB), rng.choice([1, 30, 400]))))
    words = [(rng.randrange(60),), (tokens[-1], 5), (17, 5), (4, 6), (tokens[-1], 17, 8), (30, 5)]
    perhaps(0.4, bad_words=tuple(rng.sample(words, 4)))
    masked = frozenset(rng.sample(range(VOCAB + 9), 4)) if rng.random() < 0.2 else ()
    pending = rng.choice([None, 0, 1, 2])
    length = rng.randint(0, len(tokens))
    return row(tokens=tokens, prompt_len=length, masked_ids=masked, pending_row=pending, **options)


def random_masks(rng: random.Random, count: int, vocab: int = VOCAB) -> TokenMasks:
    """Masks of some of so many rows, that allow nothing, one token, some or all."""
    rows = sorted(rng.sample(range(count), rng.randint(1, count)))
    bits = np.zeros((len(rows), -(-vocab // 32)), dtype=np.int32)
    for words in bits:
        for token in rng.sample(range(vocab), rng.choice([0, 1, 5, vocab // 2, vocab])):
            words[token // 32] |= np.int64(1 << token % 32).astype(np.int32)
    return TokenMasks(rows, bits)


def random_logits(rng: random.Random, count: int, vocab: int = VOCAB) -> torch.Tensor:
    """Peaked or flat; sometimes as coarse as bfloat16, which makes ties."""
    generator = torch.Generator().manual_seed(rng.randrange(10**6))
    logits = torch.randn(count, vocab, generator=generator) * rng.choice([0.01, 1.0, 6.0])
    return logits.bfloat16().float() if rng.random() < 0.5 else logits
