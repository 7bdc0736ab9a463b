"""The scripted engine's model: a pure function from a sequence to its next token.

Nothing is drawn from a distribution here. So of the sampling parameters the seed alone changes a token; the
servicer checks the others as for any engine, and they have no effect. Stop tokens, min_tokens, max_tokens and
all log probabilities are honoured.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Iterable, Sequence

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(value: int) -> int:
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def fold(token_ids: Iterable[int], state: int = 0) -> int:
    """Extend the 64-bit digest `state` of a sequence by `token_ids`; 0 is the digest of the empty one."""
    for token in token_ids:
        state = _mix((state + (token + 1) * _GOLDEN) & _MASK)
    return state


def token_after(state: int, position: int, *, seed: int, vocab_size: int, avoid: Collection[int] = ()) -> int:
    """Return the token at absolute `position` of the sequence whose digest is `state`.

    Ids in `avoid` are passed over to the next free one: a continuation ends only where a test says so.
    Raises ValueError if `avoid` leaves nothing to choose.
    """
    start = _mix((state ^ _mix(seed & _MASK) ^ _mix(position + _GOLDEN & _MASK)) & _MASK) % vocab_size
    for step in range(vocab_size):
        token = (start + step) % vocab_size
        if token not in avoid:
            return token
    raise ValueError("every id of the vocabulary is to be avoided")


def next_token(token_ids: Sequence[int], *, seed: int, vocab_size: int, avoid: Collection[int] = ()) -> int:
    """Return the token that follows `token_ids` (prompt and emitted): a hash of ids, seed and position.

    It depends on nothing else, so a sequence that is submitted again with its emitted tokens goes on alike.
    """
    return token_after(fold(token_ids), len(token_ids), seed=seed, vocab_size=vocab_size, avoid=avoid)


def continuation(
    token_ids: Sequence[int], count: int, *, seed: int, vocab_size: int, avoid: Collection[int] = ()
) -> list[int]:
    """Return the next `count` tokens after `token_ids`: what a scripted engine with no rule must answer."""
    state, position, tokens = fold(token_ids), len(token_ids), list[int]()
    for offset in range(count):
        token = token_after(state, position + offset, seed=seed, vocab_size=vocab_size, avoid=avoid)
        state = fold((token,), state)
        tokens.append(token)
    return tokens


def sampled_logprob(token: int, position: int) -> float:
    """Return the log probability reported for `token`: in (-4, 0], exact in float32."""
    return -(_mix(token * _GOLDEN + position & _MASK) % 256) / 64.0


def best_alternatives(token: int, position: int, count: int, vocab_size: int) -> list[tuple[int, float]]:
    """Return `count` ids with log probabilities, best first, the sampled token among them.

    Alternatives after the sampled token lie half a nat apart below it.
    """
    first = sampled_logprob(token, position)
    return [((token + rank) % vocab_size, first - 0.5 * rank) for rank in range(min(count, vocab_size))]


def vector_of(token_ids: Iterable[int], width: int, dimensions: int = 0, *, raw: bool = False) -> list[float]:
    """Return a vector of `dimensions` numbers (0: `width`), a hash of all ids. Length 1 unless `raw`."""
    state = fold(token_ids)
    numbers = [_mix(state + place * _GOLDEN & _MASK) % 255 - 127 for place in range(dimensions or width)]
    length = 1.0 if raw else math.sqrt(sum(number * number for number in numbers)) or 1.0
    return [number / length for number in numbers]


def score_of(token_ids: Iterable[int]) -> float:
    """Return a pair's score: a hash of all ids, in (0, 1), exact in float32."""
    return (fold(token_ids) % 1023 + 1) / 1024


def classes_of(token_ids: Iterable[int], count: int, *, raw: bool = False) -> list[float]:
    """Return a text's probabilities of `count` classes, or their logits (raw): a hash of all ids."""
    state = fold(token_ids)
    logits = [_mix(state + place * _GOLDEN & _MASK) % 9 - 4.0 for place in range(count)]
    if raw:
        return logits
    total = sum(map(math.exp, logits))
    return [math.exp(logit) / total for logit in logits]


def pack_vector(numbers: Sequence[float]) -> bytes:
    """Return little-endian float32, as the wire carries them."""
    return struct.pack(f"<{len(numbers)}f", *numbers)
