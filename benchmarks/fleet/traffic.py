"""What clients ask for, made from a seed: when, which prompt, how many tokens."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

VOCABULARY = 30_000


@dataclass(slots=True)
class Arrival:
    """A request. `turns`: what the session asks afterwards, each with its pause after the answer before.

    A later turn's prompt is the one before it, its answer, and the new tokens.
    """

    at_s: float
    token_ids: list[int]
    max_tokens: int
    turns: list[Turn] = field(default_factory=list)
    session: int = 0


@dataclass(frozen=True, slots=True)
class Turn:
    """A further message of a session."""

    pause_s: float
    tokens: int
    max_tokens: int


def poisson(rng: random.Random, requests: int, rate: float) -> list[Arrival]:
    """Independent prompts of 64 to 2,048 tokens at independent moments, `rate` of them a second."""
    now, made = 0.0, []
    for number in range(requests):
        now += rng.expovariate(rate)
        length = int(64 * 32 ** rng.random())
        made.append(Arrival(now, _tokens(rng, length), _answer(rng), session=number))
    return made


def bursty(rng: random.Random, requests: int, rate: float) -> list[Arrival]:
    """As `poisson`, but they come in bursts of 32 on the average, ten times as fast, with rests between."""
    made = poisson(rng, requests, rate)
    now = 0.0
    left = 0
    for arrival in made:
        if left <= 0:
            left = 1 + int(rng.expovariate(1 / 32))
            now += rng.expovariate(rate / (left * 0.9))
        now += rng.expovariate(rate * 10)
        left -= 1
        arrival.at_s = now
    return made


def multi_turn(rng: random.Random, requests: int, rate: float) -> list[Arrival]:
    """Sessions of 6 turns: one of 8 system prompts of 512 tokens, a document of 256 to 2,048 tokens of its
    own, then short messages, each with all that was said before. `requests` counts turns, and so does
    `rate`."""
    systems = [_tokens(rng, 512) for _ in range(8)]
    now, made = 0.0, []
    for number in range(max(1, requests // 6)):
        now += rng.expovariate(rate / 6)
        first = rng.choice(systems) + _tokens(rng, int(256 * 8 ** rng.random()))
        turns = [Turn(1 + rng.expovariate(1 / 4), rng.randint(16, 128), _answer(rng)) for _ in range(5)]
        made.append(Arrival(now, first, _answer(rng), turns, number))
    return made


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, VOCABULARY) for _ in range(count)]


def _answer(rng: random.Random) -> int:
    return int(16 * 16 ** rng.random())


TRAFFIC: dict[str, Callable[[random.Random, int, float], list[Arrival]]] = {
    "poisson": poisson,
    "bursty": bursty,
    "multi-turn": multi_turn,
}
